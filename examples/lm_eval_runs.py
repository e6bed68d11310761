"""How the examples call lm-eval: the command for a model, and results chosen by the name of their metric."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def lm_eval_command(model: Path, tp: int = 1, batch_size: str = "auto") -> list[str]:
    """Return the command of lm-eval up to the tasks, for training checkpoints or else for a Hugging Face directory."""
    if (model / "latest").is_file():
        program, flags = "megatron_ladder.lm_eval", ["--model", "megatron_ladder"]
        flags += ["--model_args", f"model={model},tp={tp}"]
        # Our model class has no automatic batch size.
        batch_size = "16" if batch_size == "auto" else batch_size
    else:
        program, flags = "lm_eval", ["--model", "hf"]
        flags += ["--model_args", f"pretrained={model},trust_remote_code=True,dtype=auto"]
    return [sys.executable, "-m", program, *flags, "--batch_size", batch_size]


def metric_of(results: Mapping[str, Mapping[str, Any]], task: str, metric: str) -> float:
    """Return a metric of a task.

    Args:
        results: `results` in the JSON file of lm-eval, which names each number METRIC,FILTER.
        metric: the name without the filter if lm-eval applied a single one, such as acc_norm; or with the filter, as in
            exact_match,strict-match.

    Raises:
        ValueError: lm-eval did not compute it, or with several filters; the message names what it computed.
    """
    values = {name: value for name, value in results.get(task, {}).items() if isinstance(value, float | int)}
    found = [value for name, value in values.items() if metric in (name, name.partition(",")[0])]
    if len(found) != 1:
        known = [name.removesuffix(",none") for name in values if "_stderr," not in name and "," in name]
        raise ValueError(f"lm-eval computed {', '.join(known) or 'nothing'}: name one of them")
    return float(found[0])
