"""Benchmark of the wirings in vLLM: forward passes of standard and ladder models with random weights.

On a CPU, one engine holds one model, which is walked as each wiring alternately (A B C A B C ...). The all-reduces of
the sub-blocks run over the emulated interconnect of `tools/ladder_lab/link/link.py`. On GPUs they use the real one,
and each wiring has a separate engine, because CUDA graphs contain the wiring.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
EXPERT_WIRINGS = ("farskip", "shortcut")
"""They need experts."""
STALENESS_2 = "staleness-2"
WIRINGS = ("ladder", "parallel", "ladder-parallel", "ladder-attention", STALENESS_2, *EXPERT_WIRINGS)
"""Compared with standard; all layers read late if the mode allows it."""
NO_COMM = "no-comm"
"""The standard wiring without sums: wrong results, and a bound for any interconnect."""
LLAMA = "vLLM's Llama"
DECODE_PROMPT = 8
"""Prompt tokens of each request whose decode steps are timed."""
CACHE_BLOCK = 128
"""Tokens of a block of the key-value cache on a CPU."""
ENGINE_VARIABLES = {
    # The engine runs in the process of its rank, where the walk can be changed.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The cache would return the first compiled wiring for all others.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_USE_AOT_COMPILE": "1",
}
"""Environment of the ranks."""


class Case(NamedTuple):
    """Requests whose prefill (one step, `new_tokens` 1) or decode steps are timed."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int


def table_row(
    mode: str,
    case: Case,
    wire: tuple[float, float] | None,
    wiring: str,
    times: Mapping[str, Sequence[float]],
    all_reduces: int = 0,
) -> dict[str, str]:
    """Return the cells of one wiring by their heads.

    Args:
        wire: the time of an emulated all-reduce, as a multiple of a sub-block's and in seconds.
        times: seconds of passes of this wiring and of those that it is compared with, in the same rounds.
        all_reduces: their number in a pass; the share of the wire is what they need of the pass.
    """

    def ratios(other: str) -> list[float]:
        return [baseline / seconds for baseline, seconds in zip(times[other], times[wiring], strict=True)]

    forward = statistics.median(times[wiring])
    compared = ratios("standard")
    row = {
        "mode": mode,
        "case": case.name,
        "batch": str(case.batch),
        "all-reduce": "",
        "wiring": wiring,
        "ms": f"{1e3 * forward:.2f}",
        "standard / wiring": f"{statistics.median(compared):.2f}",
        "range": f"{min(compared):.2f} to {max(compared):.2f}",
        "share of no-comm": "",
        "share of the wire": "",
    }
    if wire is not None:
        alpha, seconds = wire
        row["all-reduce"] = f"{alpha:g}c = {1e3 * seconds:.2f} ms"
        row["share of no-comm"] = f"{statistics.median(ratios(NO_COMM)):.2f}"
        row["share of the wire"] = f"{all_reduces * seconds / forward:.2f}" if all_reduces else ""
    return row


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    few = ["ladder", "parallel", "ladder-parallel"]
    add("--wirings", nargs="+", choices=WIRINGS, default=few, help="compared with standard")
    add("--case", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"], help="what is timed")
    add("--batch", nargs="+", type=int, default=[1, 8, 32], help="requests of a decode step")
    add("--prefill-tokens", type=int, default=128, help="tokens of a prefill, which has one request")
    alpha = "time of one all-reduce in sub-blocks (a pass without all-reduces over its sub-blocks); only on a CPU"
    add("--alpha", nargs="+", type=float, default=[0.0, 1.0, 2.0], help=alpha)
    mode = "inductor is vLLM's default, on GPUs with CUDA graphs"
    add("--mode", nargs="+", choices=["eager", "inductor"], default=["eager", "inductor"], help=mode)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cpu computes in fp32, cuda in bf16")
    add("--tp", type=int, default=2, help="tensor-parallel ranks, with one core or GPU each")
    add("--rounds", type=int, default=7, help="rounds that count, after one that does not")
    add("--steps", type=int, default=8, help="decode steps of a wiring in each round")
    add("--layers", type=int, default=8, help="layers of the model")
    add("--hidden", type=int, default=2048, help="hidden size")
    add("--intermediate", type=int, default=2816, help="width of the MLP; by default both sub-blocks cost the same")
    add("--experts", type=int, default=0, help="routed experts of every layer, instead of its MLP; 0 for dense layers")
    add("--topk", type=int, default=2, help="experts of a token")
    add("--expert-intermediate", type=int, default=1024, help="width of an expert")
    shared = "width of the shared expert; 0 for none; by default all experts of a token cost the same as attention"
    add("--shared-intermediate", type=int, default=768, help=shared)
    add("--heads", type=int, default=16, help="attention heads")
    add("--kv-heads", type=int, default=16, help="key-value heads")
    add("--vocab", type=int, default=4096, help="vocabulary size")
    options = parser.parse_args(argv)
    if options.tp < 2:
        parser.error(f"--tp {options.tp}: expected 2 or more; one rank has nothing to reduce")
    if min(options.rounds, options.steps, *options.batch, options.prefill_tokens) < 1:
        parser.error("--rounds, --steps, --batch and --prefill-tokens: expected 1 or more")
    without = [name for name in options.wirings if name in EXPERT_WIRINGS]
    if without and not options.experts:
        parser.error(f"--wirings {' '.join(without)}: they need --experts")
    if "shortcut" in without and not options.shared_intermediate:
        parser.error("--wirings shortcut: it needs --shared-intermediate")
    if options.experts and not 1 <= options.topk <= options.experts:
        parser.error(f"--topk {options.topk}: expected 1 to --experts {options.experts}")
    cores = len(os.sched_getaffinity(0))
    if options.device == "cpu" and cores < options.tp and "RANK" not in os.environ:
        parser.error(f"--tp {options.tp}: found {cores} cores, expected one per rank")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here: run bash vllm_plugin/install.sh")
    return options


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Iterate over what is timed."""
    if "decode" in options.case:
        # The first new token comes from the prefill.
        yield from (Case("decode", batch, DECODE_PROMPT, 1 + options.steps) for batch in options.batch)
    if "prefill" in options.case:
        yield Case("prefill", 1, options.prefill_tokens, 1)


def start_ranks(options: argparse.Namespace, argv: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun, which runs this script once per rank and receives the signals."""
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **ENGINE_VARIABLES,
    }
    if options.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))[: options.tp]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.tp}"]
    os.execve(command[0], [*command, __file__, *argv], environment)


def model_config(options: argparse.Namespace, wiring: str) -> Any:
    """Return the configuration of the model with a wiring in all layers."""
    from megatron_ladder_vllm import configuration_megatron_ladder as ladder
    from transformers import LlamaConfig

    shape = {"num_hidden_layers": options.layers, "vocab_size": options.vocab, "max_position_embeddings": 8192}
    shape |= {"hidden_size": options.hidden, "intermediate_size": options.intermediate}
    shape |= {"num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads}
    if wiring == LLAMA:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **shape)
    mode = "ladder" if wiring == STALENESS_2 else wiring
    return ladder.MegatronLadderConfig(
        architectures=["MegatronLadderForCausalLM"],
        num_experts=options.experts,
        num_experts_per_tok=options.topk,
        moe_intermediate_size=options.expert_intermediate,
        shared_expert_intermediate_size=options.shared_intermediate,
        expert_layers=list(range(options.layers)) if options.experts else None,
        residual_mode=mode,
        ladder_layers=options.layers if ladder.WIRINGS[mode].late else None,
        residual_staleness=2 if wiring == STALENESS_2 else 1,
        **shape,
    )


def time_tokens(engine: Any, prompts: Sequence[list[int]], new_tokens: int, begin: Callable[[], Any]) -> list[float]:
    """Call `begin`, and compute the requests; return when that was, and when the tokens of each step arrive.

    With asynchronous scheduling, some calls of the engine return before a step has ended.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    parameters.output_kind = RequestOutputKind.DELTA
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
    begin()
    arrivals = [time.perf_counter()]
    while engine.has_unfinished_requests():
        if engine.step():
            arrivals.append(time.perf_counter())
    return arrivals


class Engine:
    """One vLLM engine with random weights; a collective object of all ranks."""

    def __init__(self, options: argparse.Namespace, mode: str, wiring: str, graphs: str | None = None) -> None:
        """`graphs`: mode of CUDA graphs, by default that of the model's type and the GPU."""
        from vllm import LLM
        from vllm.distributed import get_tp_group

        self._options, self._on_cpu = options, options.device == "cpu"
        cases = list(cases_of(options))
        longest = max(case.prompt_tokens + case.new_tokens for case in cases)
        settings: dict[str, Any] = {"dtype": "float32" if self._on_cpu else "bfloat16"}
        if self._on_cpu:
            blocks = 2 + max(case.batch * -(-sum(case[2:]) // CACHE_BLOCK) for case in cases)
            width = options.layers * -(-options.kv_heads // options.tp) * options.hidden // options.heads
            # Two tensors of 4-byte numbers.
            settings["kv_cache_memory_bytes"] = 8 * width * CACHE_BLOCK * blocks
        if graphs is not None:
            settings["compilation_config"] = {"cudagraph_mode": graphs}
        with tempfile.TemporaryDirectory() as folder:
            model_config(options, wiring).save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                tensor_parallel_size=options.tp,
                distributed_executor_backend="external_launcher",
                seed=0,
                enforce_eager=mode == "eager",
                enable_prefix_caching=False,
                max_model_len=longest,
                max_num_seqs=max(case.batch for case in cases),
                # Every prefill fits into one step.
                max_num_batched_tokens=max(longest, *(case.batch * case.prompt_tokens for case in cases)),
                **settings,
            )
        self.group = get_tp_group()
        self._forwards: list[float] = []
        self._compiled: dict[str, Any] | None = None if mode == "eager" else {}
        (self._runner,) = self._llm.collective_rpc(lambda worker: worker.model_runner)
        self.graphs = self._runner.compilation_config.cudagraph_mode.name
        if self._on_cpu:
            self._model = self._runner.model.model
            # No wiring hides the all-reduce of the embedding, which is not emulated.
            self._model.embed_tokens.parallel_group = self.group
            self._runner.model.register_forward_pre_hook(lambda *_: self._forwards.append(-time.perf_counter()))
            self._runner.model.register_forward_hook(
                lambda *_: self._forwards.append(self._forwards.pop() + time.perf_counter())
            )

    def walk(self, wiring: str, transport: Any) -> None:
        """Compute the following steps as `wiring`, with all-reduces over `transport`; only on a CPU."""
        wired = model_config(self._options, wiring).wired_layers()
        for layer, sub_blocks in zip(self._model.layers, wired, strict=True):
            layer.sub_blocks = sub_blocks
        self._model.all_reduces.transport = transport
        if self._compiled is not None:
            self._model.aot_compiled_fn = self._compiled.get(wiring)
            if wiring not in self._compiled:
                # As vLLM does when an engine starts.
                self._model.compiled = False
                self._runner.warming_up_model()
                self._compiled[wiring] = self._model.aot_compiled_fn

    def run(self, case: Case) -> float:
        """Return the mean seconds of a case's prefill or decode steps; on a CPU, of their forward passes."""
        prompt = [position % self._options.vocab for position in range(case.prompt_tokens)]
        self._forwards.clear()
        arrivals = time_tokens(self._llm.llm_engine, [prompt] * case.batch, case.new_tokens, self.group.barrier)
        times = self._forwards if self._on_cpu else [end - begin for begin, end in itertools.pairwise(arrivals)]
        if len(times) != case.new_tokens:
            raise RuntimeError(f"expected {case.new_tokens} steps of {case}, found {len(times)}")
        # The first new token comes from the prefill.
        return statistics.mean(times[1:] or times)

    def close(self) -> None:
        """End the engine; the next one needs its memory and its names.

        It also needs a store at another port: the one of torchrun still contains the addresses of this engine's ranks.
        """
        from vllm.utils.network_utils import get_open_port

        port = self.group.broadcast_object(get_open_port())
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        self._runner = self._model = None
        del self._llm
        gc.collect()


def measure_emulated(options: argparse.Namespace, mode: str) -> Iterator[dict[str, str]]:
    """Measure all wirings in one engine, alternately, over the emulated interconnect."""
    from ladder_lab.link.link import EmulatedLink
    from megatron_ladder.comm.group import CommGroup

    engine = Engine(options, mode, "standard")
    tp = engine.group
    # Waits poll the clock instead of sleeping: each rank has its own core.
    link = EmulatedLink(CommGroup(tp.ranks, tp.rank_in_group, tp.cpu_group), spin_seconds=0.1)

    def over_link(partial: Any) -> tuple[Any, Any]:
        buffer = partial.clone()
        return buffer, link.start_all_reduce(buffer)

    def without_sum(partial: Any) -> tuple[Any, Any]:
        return partial.clone(), SimpleNamespace(wait=lambda: None)

    ways = {name: (name, over_link) for name in ("standard", *options.wirings)} | {NO_COMM: ("standard", without_sum)}
    all_reduces = {
        name: sum(not one.joins_next for layer in model_config(options, name).wired_layers() for one in layer)
        for name in ways.keys() - {NO_COMM}
    }

    def measure(case: Case, names: Sequence[str]) -> Mapping[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(1 + options.rounds):
            for name in names:
                engine.walk(*ways[name])
                times[name].append(engine.run(case))
        return {name: found[1:] for name, found in times.items()}

    for case in cases_of(options):
        bound = measure(case, [NO_COMM])[NO_COMM]
        sub_block = statistics.median(bound) / all_reduces["standard"]
        for alpha in options.alpha:
            seconds = float(link.broadcast_object(alpha * sub_block))
            link.set_wire(seconds, 0.0)
            times = measure(case, list(ways))
            for name in ways:
                yield table_row(mode, case, (alpha, seconds), name, times, all_reduces.get(name, 0))
    link.close()
    engine.close()


def measure_real(options: argparse.Namespace, mode: str) -> Iterator[dict[str, str]]:
    """Measure the wirings and, without experts, vLLM's Llama in one engine each, over the real interconnect.

    All have the same CUDA graphs; with its defaults, vLLM can capture prefills of its Llama and not of the wirings.
    """
    times: dict[Case, dict[str, list[float]]] = {case: {} for case in cases_of(options)}
    graphs = None
    for wiring in ("standard", *options.wirings, *([] if options.experts else [LLAMA])):
        engine = Engine(options, mode, wiring, graphs)
        graphs = engine.graphs
        for case, found in times.items():
            found[wiring] = [engine.run(case) for _ in range(1 + options.rounds)][1:]
        engine.close()
    for case, found in times.items():
        for wiring in found:
            yield table_row(mode, case, None, wiring, found)


def main(argv: Sequence[str]) -> None:
    """Start the ranks, or run as one of them."""
    options = parse_arguments(argv)
    if "RANK" not in os.environ:
        start_ranks(options, argv)
    measure = measure_emulated if options.device == "cpu" else measure_real
    rows = itertools.chain.from_iterable(measure(options, mode) for mode in options.mode)
    for number, row in enumerate(rows):
        if os.environ["RANK"] == "0":
            head = f"| {' | '.join(row)} |\n|{'---|' * len(row)}\n" if number == 0 else ""
            print(f"{head}| {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
