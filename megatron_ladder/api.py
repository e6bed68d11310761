"""The package from Python: trains, generates and converts in a notebook, or in a script under a launcher.

Keyword arguments are the flags of the programs, as in `train_iters=100` for `--train-iters 100`. Invalid values raise a
UserError. Under a launcher, all processes must make the same calls, but only one converts. `docs/api.md` has examples.
"""

import itertools
import math
import operator
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex

import torch
import torch.distributed as dist

from megatron_ladder.blueprint.model import ModelConfig, resolve_model
from megatron_ladder.blueprint.model_flags import LEARNING_CHECKS, ModelFlags
from megatron_ladder.comm.launch import read_rank_info, stop_process_group
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.command_line import Settings, flag_words, read_command_line
from megatron_ladder.config.run import SECTIONS, read_run
from megatron_ladder.convert.conversions import plan_export, plan_import
from megatron_ladder.convert.copying import carry_out
from megatron_ladder.convert.options import ExportOptions, ImportOptions
from megatron_ladder.errors import BadNumbersError, UserError, raise_user_errors
from megatron_ladder.flags import find_problems, keyword_name, section_flags
from megatron_ladder.generate.options import ModelOptions, OutputOptions, PromptOptions, SamplingOptions
from megatron_ladder.generate.program import check_hardware, load_engine, new_request, open_model_of
from megatron_ladder.generate.prompts import PromptEncoder, prompt_errors, read_prompts
from megatron_ladder.generate.requests import Generation
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.parallel.scoring import Request, Score, cut_requests
from megatron_ladder.processes import interrupts_delayed
from megatron_ladder.tokenizers.kinds import Tokenizer
from megatron_ladder.train.evaluation import Predictor
from megatron_ladder.train.loop import OpenRun, open_run
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.step import StepResult, evaluate, train_step

__all__ = ["build_model", "LanguageModel", "open_training", "training", "TrainingRun", "StepResult", "UserError"]
__all__ += ["BadNumbersError", "TextGenerator", "Generation", "Score", "import_model", "export_model"]

Ids = Iterable[SupportsIndex]
"""Token ids."""
TextOrIds = str | Ids
_POSITIONS = 2048
"""Longest sequence of a model that is built without max_position_embeddings."""


def build_model(vocab_size: int, seed: int = 1234, **flags: Any) -> LanguageModel:
    """Return a whole model for one process, a torch module; `flags` are those of pretrain_ladder.py for the model."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"build_model(): seed {seed!r}: expected a whole number from 0 to {2**32 - 1}")
    with _read_keywords("build_model()", [ModelFlags], {"vocab_size": vocab_size, **flags}) as (chosen,):
        if chosen.vocab_size is None:
            raise UserError("build_model(): vocab_size None: expected the number of token ids")
        config = resolve_model(chosen, chosen.vocab_size, chosen.max_position_embeddings or _POSITIONS, 1)
        raise_user_errors(find_problems(LEARNING_CHECKS, vars(config)))
    return LanguageModel(config, ProcessMesh.single(), seed=seed)


@contextmanager
def _read_keywords(function: str, sections: Sequence[type], keywords: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Enter the block with one instance of each dataclass; user errors of the block name keywords of the function."""
    if "device" in keywords:
        fix = "move the module that it returns, with .to(device)"
        if ModelFlags not in sections:
            fix = "a GPU is used if there is one: set CUDA_VISIBLE_DEVICES to choose it, or to nothing for the CPU"
        raise UserError(f"{function}: device is not a keyword: {fix}")
    settings = read_command_line(sections, _words(sections, keywords), function, "", are_keywords=True)
    with settings.words.in_messages():
        yield settings.build(sections)


def _words(sections: Sequence[type], keywords: Mapping[str, Any]) -> list[str]:
    """Return keywords as a command line, in which a list for a flag of one value is a text such as `[2]`, layer 2."""
    flags = [one for one in section_flags(*sections) if not one.value_type.many]
    single = {keyword_name(spelling) for one in flags for spelling in one.spellings}
    texts = {
        name: f"[{','.join(map(str, value))}]"
        for name, value in keywords.items()
        if name in single and isinstance(value, list | tuple)
    }
    return flag_words({**keywords, **texts})


class TrainingRun:
    """A run between its steps; `open_training` creates it. Its methods raise UserError once it is closed.

    Call `close`, or use a `with` block. A run that is garbage collected, or open when the program ends, is closed as
    after an error.
    """

    def __init__(self, context: AbstractContextManager[OpenRun]) -> None:
        self._context = context
        self._dropped = weakref.finalize(self, _close_dropped, context)
        opened = context.__enter__()
        self._opened: OpenRun | None = opened
        self._failure: BaseException | None = None
        """The error that left a step half done."""
        self._model = opened.trainer.model
        self._end_ids = opened.inputs.end_ids
        # The caller may read the weights of `model`.
        optimizer = opened.trainer.engine.optimizer
        optimizer.finishes_steps = True
        optimizer.finish_step()
        self.tokenizer = opened.inputs.tokenizer
        """The run's tokenizer; None without one."""
        self.iteration = opened.iteration
        """Number of steps done, including those of the checkpoint that the run resumed."""

    @property
    def model(self) -> LanguageModel:
        """This rank's part of the model, a torch module.

        Weights that the caller changes are trained from there. A step leaves parameters whose `requires_grad` is False
        as they are, with their moments, and without their gradients in its norm.
        """
        return self._model

    @property
    def config(self) -> ModelConfig:
        """Sizes and wiring of the model."""
        return self._model.config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._dropped.detach() is not None:
            self._opened = None
            self._context.__exit__(error_type, error, traceback)

    def close(self) -> None:
        """End the run and its process groups, after a save in flight; saves nothing, and has no effect a second time.

        All processes must call it.
        """
        error = self._failure
        self.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _require_open(self, call: str) -> OpenRun:
        """Return the open run; raises UserError if it is closed, or if a step was left half done."""
        if self._opened is None:
            raise UserError(
                f"{call}: the run is closed: call run.{call}() before it is, or give a checkpoint of the run to "
                "TextGenerator or to open_training(load=...)"
            )
        if self._failure is not None:
            raise UserError(
                f"{call}: {type(self._failure).__name__} ended step {self.iteration + 1} halfway, so its weights may "
                "be wrong: close() the run, and continue from its last checkpoint with open_training(load=...)"
            )
        return self._opened

    def step(self) -> StepResult:
        """Train on the next global batch; return its loss, gradient norm and learning rate.

        Ctrl-C, or the stop button of a notebook, takes effect after the step; a second one ends it halfway. Raises
        BadNumbersError after `max_consecutive_bad_steps` steps in a row whose numbers were not finite.
        """
        opened = self._require_open("step")
        trainer = opened.trainer
        with interrupts_delayed():
            try:
                trainer.engine.optimizer.adopt_weights()
                trainer.engine.follow_frozen()
                result = train_step(
                    trainer, next(opened.batches), self.iteration + 1, meanwhile=opened.batches.receive_ahead
                )
            except BaseException as error:
                self._failure = error
                raise
            self.iteration += 1
        opened.checkpoints.poll()
        trainer.guard.stop_if_hopeless(result.finding)
        return result

    def evaluate(self, name: str = "") -> float:
        """Return the mean loss over `eval_iters` batches of the validation data, or of the set of this name.

        Raises UserError if there is no such data.
        """
        opened = self._require_open("evaluate")
        valid = opened.inputs.sources.valid
        if name not in valid:
            known = ", ".join(map(repr, valid))
            fix = f"name one of {known}" if known else "give valid_data_path, or a share of the split"
            raise UserError(f"evaluate: the run has no validation set {name!r}; {fix}")
        with closing(sample_batches(opened.trainer, valid[name], 0)) as batches:
            return evaluate(opened.trainer, batches, opened.trainer.run.logging.eval_iters).loss

    def score(self, requests: Iterable[tuple[TextOrIds, TextOrIds]]) -> list[Score]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it, in every layout.

        A request is a pair `(context, continuation)` of texts, or of ids. A token with text of both belongs to the
        continuation. Raises ValueError if a context or continuation has no ids, a continuation is longer than
        `seq_length`, or an id is outside of the vocabulary; BadNumbersError if a result is not a number.
        """
        predictor = Predictor(self._require_open("score").trainer)
        scores = predictor.score(_encode_requests(requests, self.tokenizer))
        if any(math.isnan(score.logprob) for score in scores):
            raise BadNumbersError("score: a likelihood is not a number: weights are not finite, or too large")
        return scores

    def generate(
        self, prompts: Iterable[Ids], max_new_tokens: int, stop_ids: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, ending before a token of `stop_ids`; raises as `score`.

        By default, these are the tokens that end documents and answers in the data, and texts of a loaded model. There
        is no key-value cache: each new token costs a pass over its row.
        """
        predictor = Predictor(self._require_open("generate").trainer)
        if not 0 < max_new_tokens <= predictor.max_length:
            raise ValueError(f"max_new_tokens {max_new_tokens}: expected 1 to seq_length {predictor.max_length}")
        ends = self._end_ids if stop_ids is None else stop_ids
        return predictor.generate(list(map(_token_ids, prompts)), max_new_tokens, ends)

    def save(self) -> None:
        """Write a checkpoint to `save`; with `async_save`, the next call and `close` wait for its end.

        Raises UserError if there is no `save`, or, without `async_save`, if the checkpoint could not be written.
        """
        opened = self._require_open("save")
        config = opened.trainer.run.checkpoint
        if config.save is None:
            raise UserError("save: the run has no directory; give save")
        opened.trainer.engine.optimizer.adopt_weights()
        opened.checkpoints.save(self.iteration, opened.batches, "call", final=not config.async_save)


def open_training(**flags: Any) -> TrainingRun:
    """Open a training run with the flags of pretrain_ladder.py.

    With `load`, the run resumes. The caller trains, evaluates and saves, so flags that schedule this have no effect.
    """
    settings = read_run(_words(SECTIONS, flags), "open_training()")
    if settings.given.get("skip_train"):
        raise UserError("skip_train=True: open_training() needs training data: remove it, and call run.evaluate()")
    _check_no_process_groups("open_training")
    return TrainingRun(_leaving_groups(settings))


training = open_training
"""The former name of `open_training`."""


@contextmanager
def _leaving_groups(settings: Settings) -> Iterator[OpenRun]:
    """Open a run, and leave its process groups at the end of the block, however it ends."""
    threads = torch.get_num_threads()
    try:
        with open_run(settings) as opened:
            yield opened
    finally:
        # On CPUs, the run limits the threads of the process.
        torch.set_num_threads(threads)
        _leave_process_groups()


def _close_dropped(context: AbstractContextManager[OpenRun]) -> None:
    error = ResourceWarning("the program dropped the run without close()")
    context.__exit__(type(error), error, None)


def _check_no_process_groups(call: str) -> None:
    if dist.is_initialized():
        raise UserError(
            f"{call}: this process has process groups already: close() the run, whose model run.generate and run.score "
            "use, or the TextGenerator, or destroy the groups"
        )


def _leave_process_groups() -> None:
    """Leave the process groups without waiting for the other processes, as after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _token_ids(values: TextOrIds) -> list[int]:
    try:
        return list(map(operator.index, values))  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"expected a list of token ids, as run.tokenizer.encode returns it: {error}") from None


def _encode_requests(
    requests: Iterable[tuple[TextOrIds, TextOrIds]], tokenizer: Tokenizer | None, prefix: Sequence[int] = ()
) -> list[Request]:
    """Return the ids of contexts and continuations; `prefix` precedes the ids of texts."""
    encoded: list[Request] = []
    for context, continuation in requests:
        if not (isinstance(context, str) and isinstance(continuation, str)):
            encoded.append((_token_ids(context), _token_ids(continuation)))
            continue
        if tokenizer is None:
            raise UserError("score: there is no tokenizer for texts; give tokenizer_type and tokenizer_model, or ids")
        alone = [*prefix, *tokenizer.encode(context)]
        whole = [*prefix, *tokenizer.encode(context + continuation)]
        # A token may hold the end of the context and the beginning of the continuation.
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False))
        cut = len(list(shared))
        encoded.append((whole[:cut], whole[cut:]))
    return encoded


class TextGenerator:
    """A model that continues and scores texts: a training checkpoint, or a Hugging Face directory.

    Under a launcher, all processes together hold the model, and `close`, or the end of a `with` block, ends their
    process groups.
    """

    def __init__(self, model: str | Path, **flags: Any) -> None:
        """`flags` are those of generate.py that concern the model, such as `dtype`."""
        rank_info = read_rank_info()
        with _read_keywords("TextGenerator()", [ModelOptions], {"model": model, **flags}) as (options,):
            self._stored = open_model_of(options)
            check_hardware(rank_info, options, self._stored.config)
        if rank_info.launched:
            _check_no_process_groups("TextGenerator")
        try:
            self.engine = load_engine(rank_info, options, self._stored)
            """The engine, for requests of token ids."""
        except BaseException:
            if rank_info.launched:
                _leave_process_groups()
            raise
        self._world = dist.group.WORLD if rank_info.launched else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free captured graphs, and end the process groups; all processes must call it, once or several times."""
        self.engine.close()
        if self._world is not None and self._world is dist.group.WORLD:
            stop_process_group()

    def _check_open(self, call: str) -> None:
        if self._world is not None and self._world is not dist.group.WORLD:
            raise UserError(f"{call}: the process groups of this TextGenerator have ended: open another one")

    def generate(self, prompts: str | Sequence[str], **flags: Any) -> list[Generation]:
        """Continue texts in one batch; `flags` are those of generate.py for prompts, sampling and output."""
        self._check_open("generate")
        if flags.get("score"):
            raise UserError("generate: score=True: this call only continues texts; call score")
        # A Generation contains all that --json prints.
        keywords = {"prompt": [prompts] if isinstance(prompts, str) else list(prompts), "json": True, **flags}
        sections = [PromptOptions, SamplingOptions, OutputOptions]
        with _read_keywords("generate()", sections, keywords) as (chosen, sampling, output):
            tokenizer = self._stored.tokenizer
            if tokenizer is None:
                raise UserError("generate: the model has no tokenizer; give tokenizer_type and tokenizer_model")
            encoder = PromptEncoder(tokenizer, self._stored.prefix, chosen.chat, chosen.system)
            encoded = read_prompts(chosen, encoder, None)
            if not encoded:
                return []
            raise_user_errors(prompt_errors(encoded, self._stored.config, sampling.max_new_tokens))
        samples = range(sampling.num_samples)
        stored = replace(self._stored, eos_ids=self._stored.eos_ids | encoder.turn_ends)
        return self.engine.generate(
            [new_request(sampling, output, stored, prompt, sample) for prompt in encoded for sample in samples]
        )

    def score(self, requests: Iterable[tuple[TextOrIds, TextOrIds]]) -> list[Score]:
        """Score continuations in one batch, as `TrainingRun.score` does; the model's positions are the limit.

        Texts begin with the special tokens that the model's tokenizer puts before them.
        """
        self._check_open("score")
        config = self._stored.config
        encoded = _encode_requests(requests, self._stored.tokenizer, self._stored.prefix)
        pairs = cut_requests(encoded, config.vocab_size, config.max_position_embeddings)
        return self.engine.score_batch(pairs) if pairs else []


def import_model(hf: str | Path, save: str | Path, **flags: Any) -> None:
    """Convert a Hugging Face directory to a training checkpoint, with the flags of `convert_checkpoint.py import`."""
    with _read_keywords("import_model()", [ImportOptions], {"hf": hf, "save": save, **flags}) as (options,):
        carry_out(plan_import(options), options, print)


def export_model(load: str | Path, hf: str | Path, **flags: Any) -> None:
    """Convert a training checkpoint to a Hugging Face directory, with the flags of `convert_checkpoint.py export`."""
    with _read_keywords("export_model()", [ExportOptions], {"load": load, "hf": hf, **flags}) as (options,):
        carry_out(plan_export(options), options, print)
