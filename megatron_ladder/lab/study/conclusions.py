"""What the numbers of a study say, in sentences made from them, and what they cannot say."""

import math

from megatron_ladder.lab.study.gathered import Comparison, Gathered, Terms
from megatron_ladder.lab.study.grid import key_of
from megatron_ladder.lab.study.statistics import Verdict, deviation, t_quantile
from megatron_ladder.lab.study.tables import number
from megatron_ladder.lab.study.wirings import STANDARD

ENOUGH_TOKENS = 20
"""For a parameter, about: where the loss at a given compute is least (Hoffmann et al. 2022, arXiv 2203.15556)."""


def findings(gathered: Gathered, terms: Terms, size: str) -> list[str]:
    """A sentence for every comparison of a table, and one for all that have no result."""
    comparisons = gathered.comparisons(terms, size)
    judged = sum(not math.isnan(one.adjusted_p) for one in comparisons.values())
    sentences = [_finding(wiring, one, judged) for wiring, one in comparisons.items() if one.difference.pairs > 0]
    absent = [wiring for wiring, one in comparisons.items() if one.difference.pairs == 0]
    return [*sentences, *([f"No pair of runs yet: {', '.join(absent)}."] if absent else [])]


def resolution(gathered: Gathered, terms: Terms, size: str) -> str:
    """How small a difference these runs can see, and what is done about making several comparisons."""
    judged = [
        one.difference
        for one in gathered.comparisons(terms, size).values()
        if math.isfinite(one.difference.half_width)
    ]
    if not judged:
        return "No interval yet: it takes two pairs of runs."
    pairs = sorted({one.pairs for one in judged})
    reach = "; ".join(
        f"with {n} pairs it reaches {t_quantile(n - 1):.3f} standard errors to either side (Student's t, {n - 1} "
        f"degree{'s' if n > 2 else ''} of freedom)"
        for n in pairs
    )
    widths = sorted(one.half_width for one in judged)
    between = number(widths[0]) if len(widths) == 1 else f"{number(widths[0])} to {number(widths[-1])}"
    return (
        f"The interval is of the mean paired difference: {reach}, here {between} nats. A smaller difference than that "
        "would not have been seen. A verdict is by whether the interval leaves out 0, each wiring alone; in bold where "
        f"it also holds for all {len(judged)} comparisons of this table judged together (Holm's p at most 0.05)."
    )


def edges(gathered: Gathered, size: str) -> list[str]:
    """Says which chosen learning rates are the lowest or the highest one tried, and which ones diverged."""
    sentences = []
    for wiring in gathered.study.wirings:
        tried = gathered.tuning(size, wiring)
        chosen = gathered.study.chosen.get(key_of(size, wiring))
        if len(tried) > 1 and chosen in (min(tried), max(tried)):
            side = "lowest" if chosen == min(tried) else "highest"
            sentences.append(
                f"{wiring}: {chosen:g} is the {side} rate tried; a {'lower' if side == 'lowest' else 'higher'} one may "
                "be better for it."
            )
        diverged = [f"{rate:g}" for rate, loss in tried.items() if not math.isfinite(loss)]
        if diverged:
            sentences.append(f"{wiring} diverged at {', '.join(diverged)}.")
    return sentences


def deviations(gathered: Gathered, size: str) -> dict[str, float]:
    """Wiring -> sample standard deviation of its final losses at equal tokens over seeds, where there is one."""
    found = {
        wiring: deviation([*gathered.final_losses("tokens", size, wiring).values()])
        for wiring in gathered.wirings("tokens")
    }
    return {wiring: spread for wiring, spread in found.items() if not math.isnan(spread)}


def close_calls(gathered: Gathered, size: str) -> list[str]:
    """Says which learning rates were chosen by less than what runs of one wiring differ by from seed to seed."""
    spread = max(deviations(gathered, size).values(), default=math.nan)
    near = []
    for wiring in gathered.study.wirings:
        losses = sorted((loss, rate) for rate, loss in gathered.tuning(size, wiring).items())
        if len(losses) > 1 and losses[1][0] - losses[0][0] < spread:
            near.append(f"{wiring} ({losses[1][1]:g}, {number(losses[1][0] - losses[0][0])} above)")
    if not near:
        return []
    return [
        f"Chosen by less than the {number(spread)} nats (the greatest standard deviation of a wiring) that finished "
        f"runs differ by from seed to seed, the second-best rate in brackets: {', '.join(near)}. Another tuning seed "
        "may have chosen otherwise, and all comparisons are of the rates that were chosen."
    ]


def limits(gathered: Gathered) -> list[str]:
    """What this study is too small, or too special, to say."""
    study = gathered.study
    tokens = study.iterations * study.tokens_per_step
    counts = [one.parameters for one in gathered.results]
    rows = []
    if counts:
        per_parameter = [f"{tokens / count:.2g}" for count in (max(counts), min(counts))]
        rows.append(
            f"Models of {_range(*map(_short, (min(counts), max(counts))))} parameters, trained on "
            f"{_range(*per_parameter)} tokens for each (about {ENOUGH_TOKENS} make the best use of computing): larger "
            "models and longer runs may order the wirings otherwise."
        )
    rows.append(
        f"{len(study.seeds)} seed{'s' if len(study.seeds) != 1 else ''}, one text, one validation set: the spread is "
        "that of initial weights, of the order of samples and of the validation samples that the seed draws, and of "
        "nothing else. Runs that are paired share all three."
    )
    tried = ", ".join(f"{rate:g}" for rate in study.learning_rates)
    rows.append(
        f"Learning rates were chosen from {tried}, and from further ones where the best was at the edge, with one seed "
        f"and {study.tuning_iterations:,} iterations; all other hyper-parameters are the same for every wiring, and "
        "were tuned for none of them."
    )
    if study.step_times:
        rows.append(
            "Time is that of one machine's steps under one interconnect, and holds for that ratio of computing to "
            "communicating alone."
        )
    return rows


def _finding(wiring: str, one: Comparison, judged: int) -> str:
    paired = one.difference
    if paired.verdict is Verdict.DIVERGED:
        return f"**{wiring}**: no verdict; a run of its {paired.pairs} pairs diverged."
    if paired.verdict is Verdict.TOO_FEW:
        return f"**{wiring}**: no verdict; one pair of runs, which differ by {number(paired.mean, '+.4f')} nats."
    low, high = paired.interval
    if paired.verdict is Verdict.NOT_TOLD_APART:
        return (
            f"**{wiring}** is not told apart from {STANDARD}: between {number(max(0.0, -low))} nats better and "
            f"{number(max(0.0, high))} worse."
        )
    least, most = sorted((abs(low), abs(high)))
    sentence = f"**{wiring}** ends {paired.verdict.value} than {STANDARD} by {number(least)} to {number(most)} nats"
    if judged > 1:
        sentence += (
            f", also as one of {judged} comparisons."
            if one.holds_among_all
            else f"; that is this comparison taken alone, and as one of {judged} it may be chance (Holm's p "
            f"{one.adjusted_p:.2f})."
        )
        return sentence
    return f"{sentence}."


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _short(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count < 1e9 else f"{count / 1e9:.2f}B"
