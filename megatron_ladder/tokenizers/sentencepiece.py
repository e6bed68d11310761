"""SentencePiece models, and their conversion to a tokenizer.json."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, normalizers

from megatron_ladder.errors import Problem, UserError
from megatron_ladder.tokenizers.kinds import Tokenizer, read_model_file


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file. It represents spaces as U+2581, so this character itself is decoded as a space."""

    kind = "SentencePieceTokenizer"

    def __init__(self, model: Path) -> None:
        """Raises UserError if the file is missing, is not a SentencePiece model or has no end-of-sequence piece."""
        content = read_model_file(model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            is_json = content.lstrip().startswith(b"{")
            reason = "{}: not a SentencePiece model" + ": is JSON" * is_json
            fix = "use {tokenizer_type} HuggingFaceTokenizer" * is_json
            raise UserError(Problem({"tokenizer_model": model}, reason, fix)) from None
        self.files = (model,)
        self.contents = (content,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            reason = "{}: has no end-of-sequence piece"
            raise UserError(Problem({"tokenizer_model": model}, reason, "train it with an eos_id"))
        self.bos_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        control = filter(self._processor.is_control, range(self.vocab_size))
        self.control_tokens = {number: self._processor.id_to_piece(number) for number in control}

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(number) for number in ids]))

    def pieces(self) -> list[str]:
        return [self._processor.id_to_piece(number) for number in range(self.vocab_size)]

    def named_tokens(self) -> dict[str, str]:
        ids = {"bos": self._processor.bos_id(), "eos": self.eod_id, "unk": self._processor.unk_id()}
        return {f"{name}_token": self._processor.id_to_piece(number) for name, number in ids.items() if number >= 0}

    def as_json(self, adds_tokens: bool = True) -> bytes:
        """See `Tokenizer`; the ids are the same if transformers does not look for special tokens in a text.

        Raises UserError with a text for which `tokenizers` gives other ids.
        """
        model = sentencepiece_model_pb2.ModelProto.FromString(self.contents[0])
        problem = f"{self.files[0]}: cannot be exported: transformers"
        fix = "use the model with tools/generate.py"
        if model.trainer_spec.model_type not in (model.trainer_spec.UNIGRAM, model.trainer_spec.BPE):
            raise UserError(f"{problem} reads only unigram and BPE models: {fix}")
        library = tokenizers.Tokenizer(_library_model(model))
        # Normalization, which the decoder reverts.
        written = model.normalizer_spec
        space = "\u2581"
        steps: list[Any] = [normalizers.Replace(" ", space)]
        decoded: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
        if written.add_dummy_prefix:
            steps.insert(0, normalizers.Prepend(space))
            decoded.append(decoders.Strip(" ", 1, 0))
        if written.remove_extra_whitespaces:
            trim = normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
            steps[:0] = [trim, normalizers.Replace(tokenizers.Regex(" +"), " ")]
        if written.precompiled_charsmap:
            steps.insert(0, normalizers.Precompiled(written.precompiled_charsmap))
        library.normalizer = normalizers.Sequence(steps)
        library.decoder = decoders.Sequence(decoded)
        # Pieces that are found in a text before it is encoded.
        symbols = sorted((piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED), key=len)
        if symbols and model.trainer_spec.model_type == model.trainer_spec.BPE:
            pattern = tokenizers.Regex("|".join(map(re.escape, reversed(symbols))))
            library.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
            library.model.ignore_merges = True
        library.add_special_tokens([piece.piece for piece in model.pieces if piece.type == piece.CONTROL])
        library.encode_special_tokens = True
        # Both libraries must agree.
        probes = _probes(model)
        encodings = library.encode_batch(probes, add_special_tokens=False)
        for text, ours, theirs in zip(probes, self._processor.encode(probes), encodings, strict=True):
            if ours != theirs.ids:
                raise UserError(
                    f"{problem} would encode {text[:80]!r} as {theirs.ids[:16]}, training as {ours[:16]}: {fix}"
                )
        return library.to_str(pretty=True).encode()


_PROBES = ("", " ", "  a  a ", "\n\ta\r\n", "\U0001f389\ufeff\u200d a\u00a0b", "a\u2581 \u2581\u2581b")
"""Texts with blanks and unknown characters."""
_PROBED_LINES = 2000
_NEVER = -1e6
"""Score of a piece that is not found in texts."""


def _probes(model: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Return texts with every piece of a model, alone and between others, and the text of its training if it exists."""
    pieces = [piece.piece.replace("\u2581", " ") for piece in model.pieces]
    texts = [*_PROBES, *pieces, *("".join(pieces[begin : begin + 8]) for begin in range(0, len(pieces), 8))]
    for path in map(Path, model.trainer_spec.input):
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace") as lines:
                texts += [line.rstrip("\n") for line in itertools.islice(lines, _PROBED_LINES)]
    return texts


def _library_model(model: sentencepiece_model_pb2.ModelProto) -> Any:
    """Return the pieces of a SentencePiece model as a model of `tokenizers`.

    Only normal pieces are merged or found in a text; user-defined symbols always are.
    """
    trained = model.trainer_spec
    pieces = model.pieces
    scores = {piece.piece: piece.score for piece in pieces if piece.type == piece.NORMAL}
    if trained.model_type == trained.UNIGRAM:
        best = max(scores.values())
        scores |= {piece.piece: len(piece.piece) * best - 0.1 for piece in pieces if piece.type == piece.USER_DEFINED}
        scored = [(piece.piece, scores.get(piece.piece, _NEVER)) for piece in pieces]
        return tokenizers.models.Unigram(scored, trained.unk_id, trained.byte_fallback)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    unknown = {"unk_token": pieces[trained.unk_id].piece, "fuse_unk": True, "byte_fallback": trained.byte_fallback}
    return tokenizers.models.BPE(vocabulary, merges, **unknown)
