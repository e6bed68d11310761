"""From a command line to everything a run is made of, all mistakes found before a process group exists."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ladder.checkpoint.format import Checkpoint, find_checkpoint
from megatron_ladder.checkpoint.publish import is_published_name
from megatron_ladder.checkpoint.weights import stored_model
from megatron_ladder.comm.launch import Place
from megatron_ladder.config.data import DataConfig
from megatron_ladder.config.run import RunConfig, parse_run, resolve_run
from megatron_ladder.data.identity import data_changes, describe_training
from megatron_ladder.data.loader import OrderOptions, Sources, check_tokenizer, open_sources
from megatron_ladder.data.paths import find_data
from megatron_ladder.data.sidecar import read_sidecar, sidecar_path
from megatron_ladder.data.streaming import StreamPlan
from megatron_ladder.data.tokenizers import WITHOUT_FILES, NullTokenizer, Tokenizer, TokenizerSource, load_source
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.errors import UserError
from megatron_ladder.flags import flag_name
from megatron_ladder.model.operations import require_compiler
from megatron_ladder.train.resume_rules import resumed_run
from megatron_ladder.train.stream_inputs import open_stream, streaming_mistakes

FREE_TO_CHANGE = ("init_method_std", "max_position_embeddings")
"""What a resumed run may say otherwise of its model: it changes no stored tensor and no step."""
DEFINES_ORDER = ("seed", "seq_length")
"""What a resumed run must say alike, since the order of samples follows from it."""


@dataclass(frozen=True)
class RunInputs:
    """A checked run."""

    run: RunConfig
    deepspeed: dict[str, Any]
    """DeepSpeed's JSON."""
    tokenizer: Tokenizer | None
    sources: Sources
    checkpoint: Checkpoint | None
    """What --load names, if it holds a checkpoint."""
    eod_id: int | None = None
    """The data's end-of-document token, if a tokenizer or a data set's sidecar tells."""
    stream: StreamPlan | None = None
    """What --streaming reads for training, instead of the sources."""


def read_inputs(argv: Sequence[str], place: Place) -> RunInputs:
    """Reads the command line and opens its files.

    Raises:
        UserError: a line for each mistake: the command line's words and numbers first, then files.
    """
    mistakes: list[str] = []
    about_files: list[str] = []
    flags = parse_run(argv, mistakes)
    mistakes.extend(streaming_mistakes(flags.data))
    tokenizer, vocab_size = _find_vocabulary(flags.data, flags.model.vocab_size, mistakes, about_files)
    run = resolve_run(flags, vocab_size, place.world_size, mistakes)
    if run.training.fp16 and place.device().type != "cuda":
        mistakes.append("--fp16 needs a CUDA device, and there is none: use --bf16, or fp32 without either")
    engine_config = deepspeed_json(run, about_files)
    sources = None if _is_pointless(run) else _open_data(run, tokenizer, about_files)
    _check_folders(run, about_files)
    if run.training.compile_sub_blocks:
        try:
            require_compiler("--compile-sub-blocks")
        except UserError as error:
            about_files.extend(error.mistakes)
    vocabulary_is_known = tokenizer is not None or flags.model.vocab_size is not None
    ignored = FREE_TO_CHANGE if vocabulary_is_known else (*FREE_TO_CHANGE, "vocab_size")
    checkpoint = _open_checkpoint(run, ignored, about_files)
    if checkpoint is not None:
        run = resumed_run(run, checkpoint, about_files)
    stream = None
    if run.logging.skip_train:
        about_files.extend(_evaluation_mistakes(run, sources))
    elif run.data.streaming and sources is not None and not mistakes:
        stream = open_stream(run, tokenizer, checkpoint, about_files)
    knows_data = sources is not None and (sources.train is not None or stream is not None)
    if checkpoint is not None and sources is not None and knows_data and not run.loads_only_weights:
        found = describe_data(sources, tokenizer, stream)
        about_files.extend(_other_data(checkpoint, found, run.data.allow_data_change, place.rank))
    eod_id = None if sources is None else find_eod(run.data, sources, tokenizer, mistakes)
    if mistakes or about_files or sources is None:
        raise UserError(*mistakes, *about_files)
    return RunInputs(run, engine_config, tokenizer, sources, checkpoint, eod_id, stream)


def find_eod(
    data: DataConfig, sources: Sources, tokenizer: Tokenizer | None, mistakes: list[str]
) -> int | None:
    """The end-of-document token, None if nothing tells.

    A data set of conversations has marks of its own where they begin.

    Args:
        mistakes: gets a line if a flag has need of the token and nothing tells it, and for each data set that has
            another one in its documents, or lacks it.
    """
    flags = [flag_name(name) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
             if getattr(data, name)]  # fmt: skip
    prefixes = sorted(dataset.prefix for dataset in sources.datasets)
    known = {prefix: sidecar for prefix in prefixes if (sidecar := read_sidecar(prefix)) is not None}
    # Where no document ends with the token and no flag looks for it, it does not matter which one that is.
    matters = {
        prefix: sidecar.eod_id for prefix, sidecar in known.items() if sidecar.append_eod or data.eod_mask_loss
    }
    told = [*matters.items(), *((prefix, sidecar.eod_id) for prefix, sidecar in known.items())]
    name, eod_id = (str(told[0][0]), told[0][1]) if told else ("", None)
    if tokenizer is not None:
        name = f"--tokenizer-model {tokenizer.files[0]}" if tokenizer.files else f"--tokenizer-type {tokenizer.kind}"
        eod_id = tokenizer.eod_id
    mistakes.extend(
        f"{prefix}: the end-of-document token is {other} by {sidecar_path(prefix)}, and {eod_id} by {name}: give the "
        "tokenizer as it was when the data was made (tokenizer_config.json beside it may name the token), or "
        "preprocess the data again"
        for prefix, other in matters.items()
        if other != eod_id
    )
    if flags and eod_id is None:
        mistakes.append(
            f"{' '.join(flags)}: which token ends a document is not known: give --tokenizer-type and --tokenizer-model"
        )
    mistakes.extend(
        f"{' '.join(flags)}: the documents of {prefix} do not end with a token of their own: preprocess it with "
        "--append-eod"
        for prefix, sidecar in known.items()
        if flags and not (sidecar.append_eod or sidecar.conversations)
    )
    return eod_id


def _find_vocabulary(
    data: DataConfig, vocab_size: int | None, mistakes: list[str], about_files: list[str]
) -> tuple[Tokenizer | None, int]:
    """The tokenizer, if one was named, and the number of ids; 1 stands in for what cannot be found."""
    needs_model = data.tokenizer_type not in (None, *WITHOUT_FILES)
    if needs_model != (data.tokenizer_model is not None):
        mistakes.append("--tokenizer-type and --tokenizer-model belong together: give both")
        return None, vocab_size or 1
    if data.tokenizer_type is None:
        if vocab_size is None:
            mistakes.append("--tokenizer-type and --tokenizer-model, or --vocab-size, are required")
        return None, vocab_size or 1
    try:
        tokenizer = load_source(TokenizerSource(data.tokenizer_type, data.tokenizer_model, vocab_size=vocab_size))
    except UserError as error:
        about_files.extend(error.mistakes)
        return None, vocab_size or 1
    if tokenizer.kind == NullTokenizer.kind:
        # Its --vocab-size does not count the end of a document.
        return tokenizer, tokenizer.vocab_size
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        mistakes.append(
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} ids: leave it out"
        )
    return tokenizer, vocab_size or tokenizer.vocab_size


def _is_pointless(run: RunConfig) -> bool:
    """Whether numbers, reported already, make it pointless to look at the data."""
    return run.training.seq_length < 1


def _check_folders(run: RunConfig, about_files: list[str]) -> None:
    """Makes the directories that the run writes to: better now than after hours."""
    folders = {
        "--save": run.checkpoint.save,
        "--tensorboard-dir": run.logging.tensorboard_dir,
        "--profile-dir": run.profile.profile_dir if run.profile.profile else None,
    }
    for flag, folder in folders.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            about_files.append(f"{flag} {folder}: cannot be written to: {error.strerror}: give another directory")


def _open_data(run: RunConfig, tokenizer: Tokenizer | None, about_files: list[str]) -> Sources | None:
    data = run.data
    parts = ["train"] * (not data.streaming and not run.logging.skip_train) + ["valid"] * (run.logging.eval_iters > 0)
    run_samples = run.training.train_iters * run.global_batch_size
    order = OrderOptions(
        run.training.seq_length,
        run.training.seed,
        data.data_cache_path,
        run_samples if data.megatron_order else None,
        data.loss_on,
    )
    try:
        if data.data_cache_path is not None:
            data.data_cache_path.mkdir(parents=True, exist_ok=True)
        sources = open_sources(find_data(data), data.split, order, parts)
        if tokenizer is not None:
            check_tokenizer(sources, tokenizer)
        about_files.extend(_ids_beyond(sources, run.model.vocab_size))
    except UserError as error:
        about_files.extend(error.mistakes)
        return None
    except OSError as error:
        about_files.append(f"--data-cache-path {data.data_cache_path}: cannot be made: {error.strerror}")
        return None
    return sources


def _ids_beyond(sources: Sources, vocab_size: int) -> list[str]:
    """A line for each data set whose sidecar tells of ids that the model lacks."""
    sidecars = {dataset.prefix: read_sidecar(dataset.prefix) for dataset in sources.datasets}
    return [
        f"{prefix}: holds token ids up to {sidecar.largest_id}, the model has {vocab_size}: "
        "give the --tokenizer-model or --vocab-size of the data"
        for prefix, sidecar in sidecars.items()
        if sidecar is not None and sidecar.largest_id >= vocab_size > 1
    ]


def describe_data(
    sources: Sources, tokenizer: Tokenizer | None, stream: StreamPlan | None = None
) -> dict[str, Any]:
    """What a checkpoint keeps of the data, so that a resumed run reads the same samples on.

    Of a run that does not train it is the tokenizer alone.
    """
    sha256 = None if tokenizer is None else tokenizer.sha256
    if stream is not None:
        return {"tokenizer_sha256": sha256, "stream": stream.describe()}
    if sources.train is None:
        return {"tokenizer_sha256": sha256}
    return describe_training(sources.train, sha256)


def _open_checkpoint(run: RunConfig, ignored: Sequence[str], about_files: list[str]) -> Checkpoint | None:
    """What --load names; a directory without checkpoints is none, and the caller says so."""
    load = run.checkpoint.load
    if load is None:
        return None
    if is_published_name(load.name) and not load.exists():
        about_files.append(f"--load {load}: there is no such checkpoint")
        return None
    try:
        checkpoint = find_checkpoint(load)
        if checkpoint is not None:
            about_files.extend(_disagreements(run, checkpoint, ignored))
    except UserError as error:
        about_files.extend(error.mistakes)
        return None
    asking = {
        "--exit-on-missing-checkpoint": run.checkpoint.exit_on_missing_checkpoint,
        "--skip-train": run.logging.skip_train,
    }
    if checkpoint is None and (asks := [name for name, asked in asking.items() if asked]):
        about_files.append(f"--load {load}: holds no checkpoint, and {asks[0]} asks for one")
    return checkpoint


def _evaluation_mistakes(run: RunConfig, sources: Sources | None) -> list[str]:
    """A line for each flag that --skip-train lacks."""
    mistakes = []
    if run.checkpoint.load is None:
        mistakes.append("--skip-train evaluates the model of a checkpoint: give --load as well")
    if run.logging.eval_iters < 1:
        mistakes.append(f"--eval-iters {run.logging.eval_iters}: --skip-train only evaluates: give 1 or more")
    elif sources is not None and sources.valid is None:
        mistakes.append("--skip-train needs validation data: give --valid-data-path, or a --split with a share of it")
    return mistakes


def _other_data(checkpoint: Checkpoint, data: dict[str, Any], allowed: bool, rank: int) -> list[str]:
    """A line for each change of the data that a resumed run would read on, or, if that is allowed, a loud word."""
    changes = data_changes(checkpoint.manifest.get("data", {}), data)
    if not allowed:
        return [
            f"{change} in {checkpoint.directory}: give the same data, or --allow-data-change to read other samples"
            for change in changes
        ]
    if changes and rank == 0:
        for change in changes:
            print(f"*** --allow-data-change: {change} in {checkpoint.directory} ***", flush=True)
        print(f"*** the run goes on at sample {checkpoint.consumed_samples} of the new order ***", flush=True)
    return []


def _disagreements(run: RunConfig, checkpoint: Checkpoint, ignored: Sequence[str]) -> list[str]:
    """A line for each value of the command line that the checkpoint contradicts."""
    model = stored_model(checkpoint)
    stored, given = model.to_dict(), run.model.to_dict()
    pairs = {name: (given[name], stored[name]) for name in stored if name not in ignored}
    # What follows from the wiring is told only of the same wiring, and in the words of a flag.
    ours, theirs = pairs.pop("desync_tp")
    if model.residual_mode == run.model.residual_mode:
        pairs["tensor_model_parallel_size"] = ours, theirs
    else:
        del pairs["desync_interval"]
    training = checkpoint.manifest.get("run", {}).get("training", {})
    if not run.loads_only_weights:
        pairs |= {name: (getattr(run.training, name), training[name]) for name in DEFINES_ORDER if name in training}
    return [
        f"{flag_name(name)} {ours}: {checkpoint.directory} was trained with {theirs}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
