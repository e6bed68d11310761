"""From a command line to everything that a run is made of; all errors are found before a process group exists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.command_line import Settings
from megatron_ladder.config.run import RunConfig, describe_run, resolve_run
from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.indexed import IndexedDataset, occurs_in_sample, sampled_ends, sidecar_path
from megatron_ladder.data.loader import OrderOptions, Sources, check_tokenizer, open_sources
from megatron_ladder.data.prompt_files import read_prompt_file
from megatron_ladder.data.reading.protocol import Shard
from megatron_ladder.data.streaming import StreamInput, StreamPlan, choose_streams, find_input
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.engine.optimizer import find_fused_adam
from megatron_ladder.errors import ErrorCollector, Problem, UserError, raise_user_errors
from megatron_ladder.files import output_problem
from megatron_ladder.model.operations import require_compiler, select_operations, sink_problems
from megatron_ladder.progress import print_rank_0
from megatron_ladder.tokenizers.copies import DESCRIPTION_FILE, load_tokenizer_from_directory
from megatron_ladder.tokenizers.kinds import Tokenizer, check_parses_special_tokens, load_tokenizer, tokenizer_kind
from megatron_ladder.train.curves import check_wandb
from megatron_ladder.train.directories import look_for_checkpoint, look_into_save
from megatron_ladder.train.distillation import StoredTeacher, find_teacher, open_teacher, teacher_errors
from megatron_ladder.train.resume import (
    check_same_data,
    has_another_tokenizer,
    resume_problems,
    with_checkpoint,
)

_FIELDS_OF_ENDS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Fields that read the ends of documents."""
SamplePrompt = tuple[str, tuple[int, ...]]
"""The text and the ids of one of --sample-prompts."""


class Findings(msgspec.Struct):
    """Findings of rank 0 for all ranks, so that a thousand of them do not look at the same directories."""

    checkpoint: str | None = None
    """Directory, in --load."""
    teacher: str | None = None
    """Directory."""
    stream: StreamInput | None = None


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """A run whose values are all known, and everything that it reads, opened."""

    run: RunConfig
    tokenizer: Tokenizer | None = None
    checkpoint: Checkpoint | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """The values of all flags, by key of a configuration file."""
    sources: Sources = Sources(None, {})
    data: dict[str, Any] = field(default_factory=dict)
    """The description of the data that a resumed run compares; only the tokenizer if the run does not train."""
    eod_id: int | None = None
    """The data's end-of-document token, if a tokenizer or a data set's sidecar defines it."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end texts: those of documents, of answers in the data, and of the checkpoint."""
    answers_end: bool = True
    """Whether a token ends answers, in the data's conversations or, without any, in those of the checkpoint."""
    stream: StreamPlan | None = None
    """The training input of --streaming, which replaces the training source."""
    shards: tuple[Shard, ...] = ()
    """Shards of the stream, on rank 0."""
    sample_prompts: tuple[SamplePrompt, ...] = ()
    teacher: StoredTeacher | None = None
    """The model of --distill-from, if the run trains."""


def read_inputs(
    settings: Settings,
    rank_info: RankInfo,
    ask: Callable[[float, Callable[[], Any]], Any] = lambda minutes, look: look(),
) -> RunInputs:
    """Look at files, resolve the settings, and open what they name; raises UserError with the errors of the first stage
    that has any, one line per error.

    `ask` returns what rank 0 finds within so many minutes, see `launch.from_rank_0`; by default, this rank looks.
    """
    own_shards: list[Shard] = []

    def look() -> Any:
        with settings.words.in_messages():
            return msgspec.to_builtins(_look(settings, own_shards))

    findings = msgspec.convert(ask(settings.values["distributed_timeout_minutes"], look), Findings)
    with settings.words.in_messages():
        return _open(_resolve(settings, findings, rank_info), findings, own_shards, rank_info)


def read_dry_run(settings: Settings, world_size: int) -> RunConfig:
    """Return the run of settings with so many processes; opens no data and creates no directories.

    Raises UserError with one line per error.
    """
    with settings.words.in_messages():
        _, _, run = _complete(settings, look_for_checkpoint(settings), world_size)
    return run


def _look(settings: Settings, own_shards: list[Shard]) -> Findings:
    """Look for checkpoints, teacher and input of --streaming, whose shards `own_shards` receives; create --save."""
    findings = Findings()
    errors = ErrorCollector()
    with errors.collect("load"):
        checkpoint = look_for_checkpoint(settings)
        if checkpoint is not None:
            findings.checkpoint = str(checkpoint.directory)
            settings = with_checkpoint(settings, checkpoint)
    values = settings.values
    with errors.collect("save"):
        look_into_save(values)
    if not values["skip_train"]:
        with errors.collect("distill_from"):
            teacher = find_teacher(values["distill_from"], values["distill_weight"])
            findings.teacher = None if teacher is None else str(teacher)
        if values["streaming"]:
            with errors.collect("streaming"):
                shards, findings.stream = find_input(
                    values["streaming"], values["streaming_key"], values["streaming_skip_bad_lines"]
                )
                own_shards.extend(shards)
    errors.raise_if_any()
    return findings


def _complete(
    settings: Settings, checkpoint: Checkpoint | None, world_size: int
) -> tuple[Settings, Tokenizer | None, RunConfig]:
    """Return the settings with the values of a checkpoint, the tokenizer, and the run of so many processes."""
    if checkpoint is not None:
        settings = with_checkpoint(settings, checkpoint)
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    errors = ErrorCollector()
    with errors.collect():
        tokenizer, vocab_size = _load_vocabulary(settings.values, checkpoint)
    with errors.collect():
        run = resolve_run(settings, vocab_size, world_size)
    errors.raise_if_any()
    return settings, tokenizer, run


def _resolve(settings: Settings, findings: Findings, rank_info: RankInfo) -> RunInputs:
    """Complete the settings from the checkpoint, and compare them with it, with this machine and with DeepSpeed's JSON.

    Nothing of the data is opened yet.
    """
    errors = ErrorCollector()
    checkpoint = None
    if findings.checkpoint is not None:
        with errors.collect("load"):
            checkpoint = Checkpoint.open_unchecked(Path(findings.checkpoint))
        errors.raise_if_any()
    settings, tokenizer, run = _complete(settings, checkpoint, rank_info.world_size)
    _check_machine(run, rank_info, errors)
    with errors.collect():
        deepspeed_json(run)
    if checkpoint is not None:
        errors.add(*resume_problems(settings.given, run, checkpoint))
    errors.raise_if_any()
    values = describe_run(settings, run, None if checkpoint is None else checkpoint.directory)
    return RunInputs(run=run, tokenizer=tokenizer, checkpoint=checkpoint, values=values)


def _open(resolved: RunInputs, findings: Findings, own_shards: Sequence[Shard], rank_info: RankInfo) -> RunInputs:
    """Open data, prompts and teacher, and compare the data with the checkpoint's."""
    run, tokenizer, checkpoint = resolved.run, resolved.tokenizer, resolved.checkpoint
    teacher: StoredTeacher | None = None
    sources = resolved.sources
    eod_id: int | None = None
    stream: StreamPlan | None = None
    prompts: tuple[SamplePrompt, ...] = ()
    errors = ErrorCollector()
    if findings.teacher is not None:
        with errors.collect("distill_from"):
            teacher = open_teacher(Path(findings.teacher))
            errors.add(*teacher_errors(run, teacher, tokenizer))
            errors.add(*sink_problems(teacher.config, rank_info.device(), "distill_from", teacher.directory))
    with errors.collect():
        sources = _open_checked_sources(run, tokenizer)
        eod_id = _find_eod(run.data, sources, tokenizer, rank_info.rank)
        if run.logging.skip_train and run.logging.sample_prompts is None and not sources.valid:
            fix = "give {valid_data_path}, or a {split} with a share of it, and {eval_iters} of 1 or more"
            errors.add(Problem({"skip_train": None}, "{} needs validation data", fix))
    if findings.stream is not None:
        with errors.collect("streaming"):
            stream = _open_stream(run, tokenizer, checkpoint, findings.stream)
    with errors.collect("sample_prompts"):
        prompts = _read_sample_prompts(run, tokenizer, _parses_special_tokens(sources, stream))
    errors.raise_if_any()
    data: dict[str, Any] = {"tokenizer_sha256": None if tokenizer is None else tokenizer.identity}
    if stream is not None:
        data["stream"] = stream.describe()
    elif sources.train is not None:
        data["train"] = sources.train.describe()
    if checkpoint is not None and (sources.train or stream) and not run.loads_only_weights:
        check_same_data(checkpoint, data, run.data.allow_data_change, rank_info.rank)
    return replace(
        resolved,
        sources=sources,
        data=data,
        eod_id=eod_id,
        end_ids=_find_ends(sources, eod_id, tokenizer, checkpoint),
        answers_end=_answers_end(sources, tokenizer, checkpoint),
        stream=stream,
        shards=tuple(own_shards),
        sample_prompts=prompts,
        teacher=teacher,
    )


def _load_vocabulary(values: Mapping[str, Any], checkpoint: Checkpoint | None) -> tuple[Tokenizer | None, int | None]:
    """Return the tokenizer, if one is named or the checkpoint provides it, and the number of token ids.

    Raises UserError if neither flags nor a checkpoint determine the vocabulary, or the tokenizer cannot be read.
    """
    kind, model, vocab_size = (values[name] for name in ("tokenizer_type", "tokenizer_model", "vocab_size"))
    if kind is None and model is not None:
        raise UserError(Problem({"tokenizer_model": model}, "{} requires {tokenizer_type}"))
    stored = None if checkpoint is None else checkpoint.model().vocab_size
    tokenizer: Tokenizer | None = None
    if kind is not None:
        size = stored - 1 if vocab_size is None and stored is not None else vocab_size
        tokenizer = load_tokenizer(kind, model, size, values["eod_token"])
    elif vocab_size is None and checkpoint is not None and DESCRIPTION_FILE in checkpoint.file_names:
        tokenizer = load_tokenizer_from_directory(checkpoint.directory)
    elif vocab_size is None and stored is None:
        raise UserError(
            Problem(
                {"tokenizer_type": None},
                "{} and {tokenizer_model}, or {vocab_size}, are required without a {load} that provides them",
            )
        )
    elif values["streaming"]:
        raise UserError(Problem({"streaming": None}, "{} requires {tokenizer_type} and {tokenizer_model}"))
    if tokenizer is None:
        return None, stored if vocab_size is None else vocab_size
    known = tokenizer.vocab_size
    # The --vocab-size of this one does not count the end-of-document token.
    if "vocab_size" in tokenizer_kind(tokenizer.kind).takes:
        return tokenizer, known
    # As in transformers, a tokenizer may have ids that a loaded model lacks, unless they occur.
    if vocab_size is not None and vocab_size < known and vocab_size != stored:
        reason = f"{{}} is smaller than the tokenizer's {known} ids"
        raise UserError(Problem({"vocab_size": vocab_size}, reason, "leave it out"))
    return tokenizer, vocab_size or stored or known


def _check_machine(run: RunConfig, rank_info: RankInfo, errors: ErrorCollector) -> None:
    """Check what the run needs of this machine and that it can write its outputs: now rather than after hours."""
    if run.training.norm_implementation == "apex":
        with errors.collect():
            select_operations("apex", "false", rank_info.device())
    if run.training.linear_attention_implementation == "fla":
        with errors.collect():
            select_operations("torch", "false", rank_info.device(), "fla")
    if run.optimizer.optimizer_implementation == "apex":
        with errors.collect():
            find_fused_adam(run.optimizer, rank_info.device())
    if run.training.compile_sub_blocks == "true":
        with errors.collect():
            require_compiler("compile_sub_blocks", rank_info.device())
    errors.add(*sink_problems(run.model, rank_info.device(), "softmax_type", run.model.softmax_type))
    if run.training.cuda_graph == "true" and rank_info.device().type != "cuda":
        errors.add(Problem({"cuda_graph": None}, "{}: this machine has no GPU", "leave it out"))
    if rank_info.rank == 0:
        with errors.collect():
            check_wandb(run.logging)
    folders = {
        "save": run.checkpoint.save,
        "tensorboard_dir": run.logging.tensorboard_dir,
        "wandb_save_dir": run.logging.wandb_save_dir,
        "profile_dir": run.profile.profile_dir if run.profile.profile else None,
    }
    for name, folder in folders.items():
        if folder is None or rank_info.local_rank > 0:
            continue
        # Other errors may refuse the start, which leaves no directories.
        if problem := output_problem(folder, "directory"):
            reason = "{}: cannot be written to: {problem}"
            errors.add(Problem({name: folder}, reason, "give another directory", problem=problem))


def _open_checked_sources(run: RunConfig, tokenizer: Tokenizer | None) -> Sources:
    data = run.data
    parts = []
    if not (data.streaming or run.logging.skip_train):
        parts.append("train")
    if run.logging.eval_iters > 0:
        parts.append("valid")
    order = OrderOptions(run.training.seq_length, run.training.seed, data.loss_on)
    sources = open_sources(data, order, parts)
    if tokenizer is not None:
        check_tokenizer(sources.datasets, tokenizer)
    raise_user_errors(
        Problem(
            {},
            f"{{prefix}}: holds token ids up to {sidecar.largest_id}, the model has {run.model.vocab_size}",
            "give the {tokenizer_model} or {vocab_size} of the data",
            prefix=prefix,
        )
        for prefix, sidecar in sources.sidecars.items()
        if sidecar.largest_id >= run.model.vocab_size > 1
    )
    return sources


def _find_eod(data: DataConfig, sources: Sources, tokenizer: Tokenizer | None, rank: int) -> int | None:
    """Return the end-of-document token, if known; raises UserError if a flag needs it, or documents end with another.

    Data sets of conversations mark the start of conversations otherwise, and do not need the token.
    """
    names = [name for name in _FIELDS_OF_ENDS if getattr(data, name)]
    known = dict(sorted(sources.sidecars.items()))
    # Elsewhere no document ends with the token, and no flag looks for it.
    relevant = {prefix: sidecar.eod_id for prefix, sidecar in known.items() if sidecar.append_eod or data.eod_mask_loss}
    name, eod_id = "", None
    if tokenizer is not None:
        name, eod_id = str(Problem(tokenizer.selection, "{}")), tokenizer.eod_id
    elif known:
        prefix = next(iter(relevant or known))
        name, eod_id = str(prefix), known[prefix].eod_id
    errors: list[str | Problem] = [
        f"{prefix}: the end-of-document token is {other} by {sidecar_path(prefix)}, and {eod_id} by {name}: give the "
        "tokenizer as it was when the data was made (tokenizer_config.json next to it may name the token), or "
        "preprocess the data again"
        for prefix, other in relevant.items()
        if other != eod_id
    ]
    if names and eod_id is None:
        fix = "give {tokenizer_type} and {tokenizer_model}"
        errors.append(_problem_of_ends(names, "the end-of-document token is unknown", fix))
    reason = "the documents of {prefix} do not end with an end-of-document token"
    errors += [
        _problem_of_ends(names, reason, "preprocess it with {append_eod}", prefix=prefix)
        for prefix, sidecar in known.items()
        if names and not (sidecar.append_eod or sidecar.conversations)
    ]
    raise_user_errors(errors)
    if names and eod_id is not None:
        others = [dataset for dataset in sources.datasets if dataset.sidecar is None]
        _check_ends(others, eod_id, f"the end-of-document token {eod_id} of {name}", names, rank)
    return eod_id


def _problem_of_ends(names: Sequence[str], reason: str, fix: str = "", **texts: object) -> Problem:
    """Return a problem of fields that read the ends of documents."""
    subjects = " ".join(f"{{{name}}}" for name in names)
    return Problem(dict.fromkeys(names), f"{subjects}: {reason}", fix, **texts)


def _check_ends(datasets: Sequence[IndexedDataset], eod_id: int, described: str, names: list[str], rank: int) -> None:
    """Sample documents of data sets without a description; raises UserError if the fields have no effect on one."""
    errors = []
    for dataset in datasets:
        ends = sampled_ends(dataset)
        share = float((ends == eod_id).mean())
        if share == 0 and not occurs_in_sample(dataset, eod_id):
            tokens, counts = np.unique(ends, return_counts=True)
            reason = (
                f"no document of {{prefix}} ends with {{described}} ({len(ends):,} documents read; "
                f"most end with {tokens[counts.argmax()]})"
            )
            fix = (
                "give the tokenizer of the data, copy its {sidecar} as well if there is one, or preprocess it with "
                "{append_eod}"
            )
            sidecar = sidecar_path(dataset.prefix).name
            texts = {"prefix": dataset.prefix, "described": described, "sidecar": sidecar}
            errors.append(_problem_of_ends(names, reason, fix, **texts))
        elif share < 1:
            reason = (
                f"{share:.1%} of the documents of {{prefix}} end with {{described}} ({len(ends):,} documents read): "
                "the others run into the next document"
            )
            note = _problem_of_ends(names, reason, prefix=dataset.prefix, described=described)
            print_rank_0(f"*** {note} ***", rank)
    raise_user_errors(errors)


def _find_ends(
    sources: Sources, eod_id: int | None, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None
) -> frozenset[int]:
    ends = set() if eod_id is None else {eod_id}
    ends.update(*(sidecar.answer_ends for sidecar in sources.sidecars.values()))
    if checkpoint is not None and not has_another_tokenizer(checkpoint, tokenizer):
        ends.update(checkpoint.end_ids)
    return frozenset(ends)


def _answers_end(sources: Sources, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None) -> bool:
    if conversations := [sidecar for sidecar in sources.sidecars.values() if sidecar.conversations]:
        return any(sidecar.answer_ends for sidecar in conversations)
    return checkpoint is None or has_another_tokenizer(checkpoint, tokenizer) or checkpoint.answers_end


def _open_stream(
    run: RunConfig, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None, text_input: StreamInput
) -> StreamPlan:
    """Return the input of --streaming, with the checkpoint's number of streams unless a flag sets another."""
    data, training, shards = run.data, run.training, text_input.shards
    assert tokenizer is not None
    if data.streaming_parse_special_tokens:
        check_parses_special_tokens("streaming_parse_special_tokens", tokenizer)
    stored = {} if checkpoint is None else checkpoint.manifest.get("data", {}).get("stream", {})
    requested = stored.get("streams") if data.streaming_shards is None else data.streaming_shards
    streams = choose_streams(requested, len(shards), run.data_parallel_size)
    window = max(1, data.streaming_shuffle_buffer // streams)
    return StreamPlan(
        shards,
        streams,
        training.seq_length,
        training.seed,
        window,
        tokenizer.eod_id,
        text_input.sources,
        data.streaming_skip_bad_lines,
        data.streaming_parse_special_tokens or not tokenizer.special_tokens,
    )


def _parses_special_tokens(sources: Sources, stream: StreamPlan | None) -> bool:
    """Return whether the training data have a special token where a text spells it, as rendered conversations do."""
    if stream is not None:
        return stream.parse_special_tokens
    sidecars = [dataset.sidecar for dataset in sources.datasets]
    return any(sidecar is None or sidecar.conversations or sidecar.parse_special_tokens for sidecar in sidecars)


def _read_sample_prompts(
    run: RunConfig, tokenizer: Tokenizer | None, parse_special_tokens: bool
) -> tuple[SamplePrompt, ...]:
    path, new_tokens = run.logging.sample_prompts, run.logging.sample_tokens
    if path is None:
        return ()
    if tokenizer is None:
        fix = "give {tokenizer_type} and {tokenizer_model}"
        raise UserError(Problem({"sample_prompts": path}, "{}: needs a tokenizer", fix))
    texts = read_prompt_file(path, by_line=True)
    encoded = tokenizer.encode_documents([text for _, text in texts], parse_special_tokens)
    prompts = [(source, text, tuple(ids)) for (source, text), ids in zip(texts, encoded, strict=True)]
    raise_user_errors(
        Problem(
            {"sample_prompts": source, "sample_tokens": new_tokens, "seq_length": run.training.seq_length},
            f"{{}}: {len(ids)} tokens and {{sample_tokens}} do not fit into {{seq_length}}",
            "shorten the prompt, or lower {sample_tokens}",
        )
        for source, _, ids in prompts
        if not 0 < len(ids) <= run.training.seq_length + 1 - new_tokens
    )
    return tuple((text, ids) for _, text, ids in prompts)
