"""From a command line to everything that a run is made of; all errors are found before a process group exists."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.publish import is_published_name
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.config.data import DataConfig
from megatron_ladder.config.run import RunConfig, RunFlags, parse_run, resolve_run
from megatron_ladder.data.identity import describe_training
from megatron_ladder.data.indexed import sidecar_path
from megatron_ladder.data.loader import OrderOptions, Sources, check_tokenizer, find_data, open_sources
from megatron_ladder.data.prompt_files import read_prompt_file
from megatron_ladder.data.shards import StreamInput, find_input
from megatron_ladder.data.sidecar import sidecar_of
from megatron_ladder.data.streaming import StreamPlan, choose_streams
from megatron_ladder.data.tokenizers import (
    DESCRIPTION_FILE,
    WITHOUT_FILES,
    NullTokenizer,
    Tokenizer,
    TokenizerSource,
    load_source,
    load_tokenizer_from_directory,
)
from megatron_ladder.engine.deepspeed_json import deepspeed_json
from megatron_ladder.engine.optimizer import find_fused_adam
from megatron_ladder.errors import ErrorCollector, UserError, raise_user_errors
from megatron_ladder.flags import flag_name
from megatron_ladder.model.operations import require_compiler, select_operations
from megatron_ladder.train.curves import check_wandb
from megatron_ladder.train.distillation import StoredTeacher, find_teacher, open_teacher, teacher_errors
from megatron_ladder.train.resume import (
    check_same_data,
    complete_flags,
    look_into_directories,
    model_differences,
    open_found,
    resumed_run,
)

Ask = Callable[[float, Callable[[], Any]], Any]
"""Receives a time limit in minutes, and a function that rank 0 calls; returns the function's value on every rank."""
SamplePrompt = tuple[str, tuple[int, ...]]
"""The text and the ids of one of --sample-prompts."""


@dataclass(frozen=True)
class RunInputs:
    """A validated run."""

    run: RunConfig
    deepspeed: dict[str, Any]
    tokenizer: Tokenizer | None
    sources: Sources
    checkpoint: Checkpoint | None
    eod_id: int | None = None
    """The data's end-of-document token, if a tokenizer or a data set's sidecar defines it."""
    stream: StreamPlan | None = None
    """The training input of --streaming, which replaces the training source."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values of all flags, by key of a configuration file."""
    sample_prompts: tuple[SamplePrompt, ...] = ()
    teacher: StoredTeacher | None = None
    """The model of --distill-from, if the run trains."""


def read_dry_run(argv: Sequence[str], world_size: int) -> RunConfig:
    """Return the run of a command line with so many processes; opens no data and creates no directories.

    Raises UserError with one line per error.
    """
    errors, vocab_size = ErrorCollector(), None
    flags = parse_run(argv, errors.messages)
    with errors.collect():
        checkpoint = open_found(look_into_directories(flags))
        if checkpoint is not None:
            flags = complete_flags(flags, checkpoint)
        _, vocab_size = _load_vocabulary(flags, checkpoint)
    run = resolve_run(flags, vocab_size or 1, world_size, errors.messages)
    errors.raise_if_any()
    return run


def read_inputs(argv: Sequence[str], place: RankInfo, ask: Ask = lambda minutes, look: look()) -> RunInputs:
    """Read the command line and open the files that it names; raises UserError with one line per error.

    `ask` returns the findings of rank 0, see `launch.from_rank_0`; by default, this rank looks.
    """
    errors, found = ErrorCollector(), ErrorCollector()
    flags = parse_run(argv, errors.messages)
    streams = bool(flags.data.streaming) and not errors.messages and not flags.logging.skip_train
    look = _Look(flags, streams)
    findings = ask(flags.parallel.distributed_timeout_minutes, look)
    checkpoint, load_errors = None, ErrorCollector()
    with load_errors.collect():
        checkpoint = open_found(findings["directories"])
        if checkpoint is not None:
            flags = complete_flags(flags, checkpoint)
    if load_errors.messages:
        errors.add(*flags.explain(load_errors.messages))
        # The sizes that it would provide are unknown.
        unknown = {"seq_length", *(one.name for one in fields(flags.model))} - flags.given | {"load"}
        flags = replace(flags, faulty=flags.faulty | set(map(flag_name, unknown)))
    tokenizer, vocab_size = None, None
    with found.collect():
        tokenizer, vocab_size = _load_vocabulary(flags, checkpoint)
    run = resolve_run(flags, vocab_size or 1, place.world_size, errors.messages)
    _check_machine(run, place, found)
    flags_are_valid = not errors.messages and not found.messages
    deepspeed = deepspeed_json(run, found.messages)
    found.add(*findings["directories"]["save_errors"])
    if checkpoint is not None:
        found.add(*model_differences(run, checkpoint, vocab_size is not None))
        run = resumed_run(run, checkpoint, found)
    teacher = None
    with found.collect("--distill-from"):
        teacher = open_teacher(findings["teacher"])
    if teacher is not None:
        found.add(*teacher_errors(run, teacher, vocab_size is not None))
    sources, stream, eod_id = None, None, None
    with found.collect():
        if run.training.seq_length > 0:
            sources = _open_sources(run, tokenizer)
            eod_id = _find_eod(run.data, sources, tokenizer)
    if run.logging.skip_train:
        if run.checkpoint.load is None:
            found.add("--skip-train evaluates the model of a checkpoint: give --load as well")
        only_losses = run.logging.sample_prompts is None and run.logging.eval_callable is None
        if only_losses and run.logging.eval_iters < 1:
            found.add(f"--eval-iters {run.logging.eval_iters}: --skip-train only evaluates: give 1 or more")
        elif only_losses and sources is not None and not sources.valid:
            found.add("--skip-train needs validation data: give --valid-data-path, or a --split with a share of it")
    elif run.data.streaming and flags_are_valid:
        with found.collect():
            raise_user_errors(findings["input_errors"])
            text_input = look.text_input or StreamInput.from_record(findings["input"])
            if place.rank > 0 and place.local_rank == 0:
                text_input.check_files()
            stream = _open_stream(run, tokenizer, checkpoint, text_input)
    prompts: tuple[SamplePrompt, ...] = ()
    with found.collect():
        prompts = _read_sample_prompts(run, tokenizer)
    knows_data = sources is not None and (sources.train is not None or stream is not None)
    if checkpoint is not None and sources is not None and knows_data and not run.loads_only_weights:
        with found.collect():
            data = describe_data(sources, tokenizer, stream)
            check_same_data(checkpoint, data, run.data.allow_data_change, place.rank)
    errors.add(*flags.explain(found.messages))
    errors.raise_if_any()
    assert sources is not None
    values = flags.describe(run, None if checkpoint is None else checkpoint.directory)
    return RunInputs(run, deepspeed, tokenizer, sources, checkpoint, eod_id, stream, values, prompts, teacher)


def describe_data(sources: Sources, tokenizer: Tokenizer | None, stream: StreamPlan | None = None) -> dict[str, Any]:
    """Return the description of data that a resumed run compares; only the tokenizer if the run does not train."""
    sha256 = None if tokenizer is None else tokenizer.sha256
    if stream is None and sources.train is not None:
        return describe_training(sources.train, sha256)
    return {"tokenizer_sha256": sha256, **({} if stream is None else {"stream": stream.describe()})}


def _load_vocabulary(flags: RunFlags, checkpoint: Checkpoint | None) -> tuple[Tokenizer | None, int | None]:
    """Return the tokenizer, if one is named or the checkpoint provides it, and the number of token ids.

    Raises UserError if neither flags nor a checkpoint determine the vocabulary, or the tokenizer cannot be read.
    """
    data, vocab_size = flags.data, flags.model.vocab_size
    needs_model = data.tokenizer_type not in (None, *WITHOUT_FILES)
    if needs_model != (data.tokenizer_model is not None):
        raise UserError("--tokenizer-type and --tokenizer-model belong together: give both")
    stored = None if checkpoint is None else checkpoint.model().vocab_size
    tokenizer: Tokenizer | None = None
    if data.tokenizer_type is not None:
        size = stored - 1 if vocab_size is None and stored is not None else vocab_size
        tokenizer = load_source(TokenizerSource(data.tokenizer_type, data.tokenizer_model, vocab_size=size))
    elif vocab_size is None and checkpoint is not None and DESCRIPTION_FILE in checkpoint.file_names:
        tokenizer = load_tokenizer_from_directory(checkpoint.directory)
    elif vocab_size is None and stored is None:
        raise UserError(
            "--tokenizer-type and --tokenizer-model, or --vocab-size, are required without a --load that provides them"
        )
    elif data.streaming:
        raise UserError("--streaming requires --tokenizer-type and --tokenizer-model")
    if tokenizer is None:
        return None, stored if vocab_size is None else vocab_size
    known = tokenizer.vocab_size
    # The --vocab-size of this one does not count the end-of-document token.
    if tokenizer.kind == NullTokenizer.kind:
        return tokenizer, known
    if vocab_size is not None and vocab_size < known:
        raise UserError(f"--vocab-size {vocab_size} is smaller than the tokenizer's {known} ids: leave it out")
    return tokenizer, max(known, stored or 0) if vocab_size is None else vocab_size


def _check_machine(run: RunConfig, place: RankInfo, errors: ErrorCollector) -> None:
    """Check what the run needs of this machine, and create its output directories: now rather than after hours."""
    if run.training.norm_implementation == "apex":
        with errors.collect():
            select_operations("apex", "false", place.device())
    if run.optimizer.optimizer_implementation == "apex":
        with errors.collect():
            find_fused_adam(run.optimizer, place.device())
    if run.training.compile_sub_blocks == "true":
        with errors.collect():
            require_compiler("--compile-sub-blocks", place.device())
    if place.rank == 0:
        with errors.collect():
            check_wandb(run)
    save = run.checkpoint.save
    if save is not None and is_published_name(save.name):
        errors.add(f"--save {save}: is the name of a single checkpoint: give the directory above it")
        save = None
    folders = {
        "--save": save,
        "--tensorboard-dir": run.logging.tensorboard_dir,
        "--wandb-save-dir": run.logging.wandb_save_dir,
        "--profile-dir": run.profile.profile_dir if run.profile.profile else None,
    }
    for flag, folder in folders.items():
        if folder is None or place.local_rank > 0:
            continue
        try:
            try:
                tempfile.TemporaryFile(dir=folder).close()
            except FileNotFoundError:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            errors.add(f"{flag} {folder}: cannot be written to: {error.strerror}: give another directory")


def _open_sources(run: RunConfig, tokenizer: Tokenizer | None) -> Sources:
    data = run.data
    parts = ["train"] * (not data.streaming and not run.logging.skip_train) + ["valid"] * (run.logging.eval_iters > 0)
    samples = {"train": run.training.train_iters * run.global_batch_size, "valid": run.validation_samples}
    megatron_samples = samples if data.megatron_order else None
    order = OrderOptions(
        run.training.seq_length, run.training.seed, data.data_cache_path, megatron_samples, data.loss_on
    )
    if (cache := data.data_cache_path) is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--data-cache-path {cache}: cannot be created: {error.strerror}: give another") from None
    sources = open_sources(find_data(data), data.split, order, parts)
    if tokenizer is not None:
        check_tokenizer(sources, tokenizer)
    sidecars = {dataset.prefix: sidecar_of(dataset) for dataset in sources.datasets}
    raise_user_errors(
        f"{prefix}: holds token ids up to {sidecar.largest_id}, the model has {run.model.vocab_size}: "
        "give the --tokenizer-model or --vocab-size of the data"
        for prefix, sidecar in sidecars.items()
        if sidecar is not None and sidecar.largest_id >= run.model.vocab_size > 1
    )
    return sources


def _find_eod(data: DataConfig, sources: Sources, tokenizer: Tokenizer | None) -> int | None:
    """Return the end-of-document token, if known; raises UserError if a flag needs it, or documents end with another.

    Data sets of conversations mark the start of conversations otherwise, and do not need the token.
    """
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    flags = " ".join(flag_name(name) for name in names if getattr(data, name))
    datasets = sorted(sources.datasets, key=attrgetter("prefix"))
    known = {dataset.prefix: sidecar for dataset in datasets if (sidecar := sidecar_of(dataset)) is not None}
    # Elsewhere no document ends with the token, and no flag looks for it.
    relevant = {prefix: one.eod_id for prefix, one in known.items() if one.append_eod or data.eod_mask_loss}
    candidates = [*relevant.items(), *((prefix, one.eod_id) for prefix, one in known.items()), ("", None)]
    name, eod_id = str(candidates[0][0]), candidates[0][1]
    if tokenizer is not None:
        name = f"--tokenizer-model {tokenizer.files[0]}" if tokenizer.files else f"--tokenizer-type {tokenizer.kind}"
        eod_id = tokenizer.eod_id
    errors = [
        f"{prefix}: the end-of-document token is {other} by {sidecar_path(prefix)}, and {eod_id} by {name}: give the "
        "tokenizer as it was when the data was made (tokenizer_config.json next to it may name the token), or "
        "preprocess the data again"
        for prefix, other in relevant.items()
        if other != eod_id
    ]
    if flags and eod_id is None:
        errors.append(f"{flags}: the end-of-document token is unknown: give --tokenizer-type and --tokenizer-model")
    errors += [
        f"{flags}: the documents of {prefix} do not end with an end-of-document token: preprocess it with --append-eod"
        for prefix, sidecar in known.items()
        if flags and not (sidecar.append_eod or sidecar.conversations)
    ]
    raise_user_errors(errors)
    return eod_id


class _Look:
    """Finds for all ranks, when rank 0 calls it, checkpoints, teacher and input of --streaming; creates --save."""

    def __init__(self, flags: RunFlags, streams: bool) -> None:
        self._flags, self._streams = flags, streams
        self.text_input: StreamInput | None = None

    def __call__(self) -> dict[str, Any]:
        data, errors = self._flags.data, ErrorCollector()
        if self._streams:
            with errors.collect():
                self.text_input = find_input(data.streaming, data.streaming_key, data.streaming_skip_bad_lines)
        record = None if self.text_input is None else self.text_input.record()
        directories, save = look_into_directories(self._flags), self._flags.checkpoint.save
        if save is not None and not is_published_name(save.name):
            # Now, so that no other rank has to. Every host reports why it cannot write there.
            with suppress(OSError):
                save.mkdir(parents=True, exist_ok=True)
        teacher = find_teacher(self._flags)
        return {"directories": directories, "teacher": teacher, "input": record, "input_errors": errors.messages}


def _open_stream(
    run: RunConfig, tokenizer: Tokenizer | None, checkpoint: Checkpoint | None, text_input: StreamInput
) -> StreamPlan:
    """Return the input of --streaming, with the checkpoint's number of streams unless a flag sets another."""
    data, training, shards = run.data, run.training, text_input.shards
    assert tokenizer is not None
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
    )


def _read_sample_prompts(run: RunConfig, tokenizer: Tokenizer | None) -> tuple[SamplePrompt, ...]:
    path, new_tokens = run.logging.sample_prompts, run.logging.sample_tokens
    if path is None:
        return ()
    if tokenizer is None:
        raise UserError(f"--sample-prompts {path}: needs a tokenizer: give --tokenizer-type and --tokenizer-model")
    texts = read_prompt_file("--sample-prompts", path, by_line=True)
    prompts = [(source, text, tuple(tokenizer.encode(text))) for source, text in texts]
    raise_user_errors(
        f"{source}: {len(ids)} tokens and --sample-tokens {new_tokens} do not fit into --seq-length "
        f"{run.training.seq_length}: shorten the prompt, or lower --sample-tokens"
        for source, _, ids in prompts
        if not 0 < len(ids) <= run.training.seq_length + 1 - new_tokens
    )
    return tuple((text, ids) for _, text, ids in prompts)
