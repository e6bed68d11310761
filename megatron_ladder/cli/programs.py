"""Every program with the dataclasses that its flags are made of; what the reference pages are written from.

A program `tools/NAME.py` is `main` of the module NAME beside this one, and has a function `parse_options` there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from megatron_ladder.cli import (
    benchmark,
    benchmark_data,
    convert_checkpoint,
    exposed_communication,
    generate,
    inspect_data,
    merge_datasets,
    plan,
    plot_loss,
    prepare_corpus,
    preprocess_data,
    pretrain,
    report_run,
    run_resilient,
    study,
    throughput,
    train_tokenizer,
    write_reference,
)
from megatron_ladder.config import run
from megatron_ladder.convert import options as convert_options
from megatron_ladder.generate import options as generate_options
from megatron_ladder.lab.bench.options import BenchmarkOptions
from megatron_ladder.lab.plan import options as plan_options
from megatron_ladder.lab.study import command_line as study_command_line
from megatron_ladder.lab.study import options as study_options


@dataclass(frozen=True)
class Command:
    """A program, or what it does after one of its verbs."""

    words: str
    """What stands before the flags, such as `DIR`, or a verb."""
    description: str
    """A sentence; empty where the program's own says it."""
    sections: tuple[type, ...]
    """The dataclasses of its flags, in the order of `--help`."""


@dataclass(frozen=True)
class Program:
    """What one page is about."""

    module: ModuleType
    commands: tuple[Command, ...]


def _plain(module: ModuleType, *sections: type) -> Program:
    return Program(module, (Command("", "", sections),))


_CONVERSIONS = tuple(Command(verb, text, (kind,)) for verb, (kind, text) in convert_options.KINDS.items())
_INSPECTION = Command("inspect DIR", "Says what a directory is, and what it lacks. It has no flags.", ())
_STUDY_SECTIONS: Mapping[study_command_line.Command, tuple[type, ...]] = {
    "run": (study_options.RunOptions,),
    "adapt": (study_options.RunOptions, study_options.AdaptOptions),
    "report": (study_options.ReportOptions,),
}
_STUDIES = tuple(
    Command(verb, study_command_line.DESCRIPTIONS[verb], sections) for verb, sections in _STUDY_SECTIONS.items()
)
_PLANS = tuple(Command(verb, plan_options.DESCRIPTIONS[verb], (kind,)) for verb, kind in plan_options.KINDS.items())

PROGRAMS: Mapping[str, Program] = {
    "pretrain_ladder.py": _plain(pretrain, *run.SECTIONS),
    "tools/benchmark.py": Program(benchmark, (Command("decode|prefill|train", "", (BenchmarkOptions,)),)),
    "tools/benchmark_data.py": _plain(benchmark_data, benchmark_data.DataBenchmarkOptions),
    "tools/convert_checkpoint.py": Program(convert_checkpoint, (*_CONVERSIONS, _INSPECTION)),
    "tools/exposed_communication.py": _plain(
        exposed_communication, exposed_communication.ExposedCommunicationConfig
    ),
    "tools/generate.py": _plain(generate, *generate_options.SECTIONS),
    "tools/inspect_data.py": _plain(inspect_data, inspect_data.InspectConfig),
    "tools/merge_datasets.py": _plain(merge_datasets, merge_datasets.MergeConfig),
    "tools/plan.py": Program(plan, _PLANS),
    "tools/plot_loss.py": _plain(plot_loss, plot_loss.PlotLossConfig),
    "tools/prepare_corpus.py": _plain(prepare_corpus, prepare_corpus.PrepareCorpusConfig),
    "tools/preprocess_data.py": _plain(preprocess_data, preprocess_data.PreprocessConfig),
    "tools/report_run.py": _plain(report_run, report_run.ReportRunConfig),
    "tools/run_resilient.py": _plain(run_resilient, run_resilient.ResilientConfig),
    "tools/study.py": Program(study, _STUDIES),
    "tools/throughput.py": _plain(throughput, throughput.ThroughputOptions),
    "tools/train_tokenizer.py": _plain(train_tokenizer, train_tokenizer.TrainTokenizerConfig),
    "tools/write_reference.py": _plain(write_reference, write_reference.WriteReferenceConfig),
}
"""Path of a script -> the program; a new one gets its page by a line here."""
