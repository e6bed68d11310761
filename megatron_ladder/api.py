"""The package from Python: trains, generates and converts in a notebook, or in a script under a launcher.

Keyword arguments are the flags of the programs, as in `train_iters=100` for `--train-iters 100`. Invalid values raise a
UserError. Under a launcher, all processes must make the same calls. `docs/api.md` has examples.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

import torch.distributed as dist

from megatron_ladder.blueprint.model import ModelConfig, ModelFlags, learning_errors, resolve_model
from megatron_ladder.comm.launch import read_rank_info
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.command_line import flag_words, parse_command_line
from megatron_ladder.config.run import read_run_words
from megatron_ladder.convert.conversions import plan_export, plan_import
from megatron_ladder.convert.copying import carry_out
from megatron_ladder.convert.options import ExportOptions, ImportOptions
from megatron_ladder.errors import BadNumbersError, UserError, raise_user_errors
from megatron_ladder.generate.loading import open_model
from megatron_ladder.generate.options import ModelOptions, OutputOptions, PromptOptions, SamplingOptions
from megatron_ladder.generate.program import build_engine, check_hardware, new_request
from megatron_ladder.generate.prompts import PromptEncoder, prompt_errors, read_prompts
from megatron_ladder.generate.requests import Generation
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.train.evaluation import Predictor, Score
from megatron_ladder.train.loop import OpenRun, open_run
from megatron_ladder.train.reading import sample_batches
from megatron_ladder.train.step import StepResult, evaluate, train_step

_POSITIONS = 2048
"""Longest sequence of a model that is built without max_position_embeddings."""


def build_model(vocab_size: int, seed: int = 1234, **flags: Any) -> LanguageModel:
    """Return a whole model for one process, a torch module; `flags` are those of pretrain_ladder.py for the model."""
    (chosen,) = parse_command_line([ModelFlags], flag_words({"vocab_size": vocab_size, **flags}), "build_model", "")
    errors: list[str] = []
    config = resolve_model(chosen, vocab_size, chosen.max_position_embeddings or _POSITIONS, 1, errors)
    raise_user_errors([*errors, *learning_errors(config)])
    return LanguageModel(config, ProcessMesh.single(), seed=seed)


class TrainingRun:
    """A run between its steps; `training` creates it."""

    def __init__(self, opened: OpenRun) -> None:
        self._trainer, self._checkpoints, self._batches = opened.trainer, opened.checkpoints, opened.batches
        self._valid = opened.inputs.sources.valid
        self._predictor = Predictor(opened.trainer)
        self.tokenizer = opened.inputs.tokenizer
        """The run's tokenizer; None without one."""
        self.iteration = opened.iteration
        """Number of steps done, including those of the checkpoint that the run resumed."""

    @property
    def model(self) -> LanguageModel:
        """This rank's part of the model, a torch module. Weights that the caller changes are trained from there."""
        return self._trainer.model

    @property
    def config(self) -> ModelConfig:
        """Sizes and wiring of the model."""
        return self._trainer.run.model

    def step(self) -> StepResult:
        """Train on the next global batch; return its loss, gradient norm and learning rate.

        Raises BadNumbersError after `max_consecutive_bad_steps` steps in a row whose numbers were not finite.
        """
        self.iteration += 1
        self._trainer.engine.state.adopt_weights()
        with self._trainer.engine.keeping_frozen():
            result = train_step(self._trainer, next(self._batches), self.iteration)
        # The caller may read the weights of `model`.
        self._trainer.engine.finish_step()
        self._checkpoints.poll()
        self._trainer.guard.stop_if_hopeless(result.finding)
        return result

    def evaluate(self, name: str = "") -> float:
        """Return the mean loss over `eval_iters` batches of the validation data, or of the set of this name.

        Raises UserError if there is no such data.
        """
        if name not in self._valid:
            known = ", ".join(map(repr, self._valid))
            fix = f"name one of {known}" if known else "give valid_data_path, or a share of the split"
            raise UserError(f"evaluate: the run has no validation set {name!r}; {fix}")
        with closing(sample_batches(self._trainer, self._valid[name], 0)) as batches:
            return evaluate(self._trainer, batches, self._trainer.run.logging.eval_iters)

    def score(self, requests: Iterable[tuple[Iterable[int], Iterable[int]]]) -> list[Score]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it, in every layout.

        A request is a pair of ids, `(context, continuation)`. Raises ValueError if one is empty, a continuation is
        longer than `seq_length`, or an id is outside of the vocabulary; BadNumbersError if a result is not a number.
        """
        scores = self._predictor.score(
            [(_token_ids(context), _token_ids(following)) for context, following in requests]
        )
        if any(math.isnan(score.logprob) for score in scores):
            raise BadNumbersError("score: a likelihood is not a number: weights are not finite, or too large")
        return scores

    def generate(
        self, prompts: Iterable[Iterable[int]], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, ending before a token of `stop_ids`; raises as `score`.

        There is no key-value cache: each new token costs a pass over its row.
        """
        if not 0 < max_new_tokens <= self._predictor.max_length:
            raise ValueError(f"max_new_tokens {max_new_tokens}: expected 1 to seq_length {self._predictor.max_length}")
        return self._predictor.generate(list(map(_token_ids, prompts)), max_new_tokens, stop_ids)

    def save(self) -> None:
        """Write a checkpoint to `save`; with `async_save`, the next call and the end of the block wait for its end.

        Raises UserError if there is no `save`, or, without `async_save`, if the checkpoint could not be written.
        """
        config = self._trainer.run.checkpoint
        if config.save is None:
            raise UserError("save: the run has no directory; give save")
        self._trainer.engine.state.adopt_weights()
        self._checkpoints.save(self.iteration, self._batches, "call", final=not config.async_save)


@contextmanager
def training(**flags: Any) -> Iterator[TrainingRun]:
    """Open a training run with the flags of pretrain_ladder.py, and close it at the end of the block.

    With `load`, the run resumes. The caller trains, evaluates and saves, so flags that schedule this have no effect.
    """
    words = read_run_words(flag_words(flags))
    if words.words.get("skip_train") == "true":
        raise UserError("skip_train=True: training() needs training data: remove it, and call run.evaluate()")
    if dist.is_initialized():
        raise UserError(
            "training: this process has process groups already: end the other training() block, or destroy them"
        )
    try:
        with open_run(words) as opened:
            # The caller may read the weights of `model`.
            opened.trainer.engine.finish_step()
            yield TrainingRun(opened)
    finally:
        # After an error, without waiting for the other processes.
        if dist.is_initialized():
            dist.destroy_process_group()


def _token_ids(values: Iterable[SupportsIndex]) -> list[int]:
    try:
        return list(map(operator.index, values))
    except TypeError as error:
        raise ValueError(f"expected a list of token ids, as run.tokenizer.encode returns it: {error}") from None


class TextGenerator:
    """A model that continues texts: a training checkpoint, or a Hugging Face directory."""

    def __init__(self, model: str | Path, **flags: Any) -> None:
        """`flags` are those of generate.py that concern the model, such as `dtype`."""
        options: ModelOptions
        (options,) = parse_command_line([ModelOptions], flag_words({"model": model, **flags}), "TextGenerator", "")
        place = read_rank_info()
        self._stored = open_model(options.model, options.tokenizer_type, options.tokenizer_model)
        check_hardware(place, options, self._stored.config)
        self.engine = build_engine(place, options, self._stored)
        """The engine, for requests of token ids."""

    def close(self) -> None:
        """Free what GPUs have captured; needed before the process groups are destroyed."""
        self.engine.close()

    def generate(self, prompts: str | Sequence[str], **flags: Any) -> list[Generation]:
        """Continue texts in one batch; `flags` are those of generate.py for prompts, sampling and output."""
        if flags.get("score"):
            raise UserError("generate: score=True: this call only continues texts; engine.score computes likelihoods")
        # A Generation contains all that --json prints.
        words = flag_words({"prompt": [prompts] if isinstance(prompts, str) else list(prompts), "json": True, **flags})
        sections = [PromptOptions, SamplingOptions, OutputOptions]
        chosen, sampling, output = parse_command_line(sections, words, "generate", "")
        tokenizer = self._stored.tokenizer
        if tokenizer is None:
            raise UserError("generate: the model has no tokenizer; give tokenizer_type and tokenizer_model")
        encoder = PromptEncoder(tokenizer, self._stored.prefix, chosen.chat, chosen.system)
        found = read_prompts(chosen, encoder, None)
        if not found:
            return []
        raise_user_errors(prompt_errors(found, self._stored.config, sampling.max_new_tokens))
        samples = range(sampling.num_samples)
        return self.engine.generate(
            [new_request(sampling, output, self._stored, prompt, sample) for prompt in found for sample in samples]
        )


def import_model(hf: str | Path, save: str | Path, **flags: Any) -> None:
    """Convert a Hugging Face directory to a training checkpoint, with the flags of `convert_checkpoint.py import`."""
    (options,) = parse_command_line([ImportOptions], flag_words({"hf": hf, "save": save, **flags}), "import_model", "")
    carry_out(plan_import(options), options, print)


def export_model(load: str | Path, hf: str | Path, **flags: Any) -> None:
    """Convert a training checkpoint to a Hugging Face directory, with the flags of `convert_checkpoint.py export`."""
    (options,) = parse_command_line([ExportOptions], flag_words({"load": load, "hf": hf, **flags}), "export_model", "")
    carry_out(plan_export(options), options, print)
