"""Compare the generator and the server of megatron_ladder with those of vLLM on one CPU core.

    python vllm_plugin/generator_benchmark.py generate --vllm-python VLLM_ENV/bin/python
    python vllm_plugin/generator_benchmark.py serve --vllm-python VLLM_ENV/bin/python

Both programs read the same Llama of 134 million random parameters and continue the same prompts greedily on one thread
of the same core. They take turns: one works while the other waits for its input. `generate` compares whole batches in
the two processes; `serve` compares streams from the two HTTP servers, with the clients on another core. The program
that waits is suspended, because vLLM's worker looks for work in a loop that takes 15 % of the core. Each line of the
result is a median over the rounds, with minimum and maximum.

Run it with the environment of megatron_ladder. vLLM needs a separate environment, because the two pin other versions.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

Prompts = list[list[int]]
Continue = Callable[[Prompts, int], Prompts]
"""(prompts, tokens to generate) -> the generated tokens."""

REPOSITORY = Path(__file__).resolve().parents[1]
VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
OURS, VLLM = "megatron_ladder", "vllm"
LAYERS, HIDDEN, INNER, HEADS, VOCABULARY, POSITIONS = 12, 768, 2048, 12, 32_000, 512
START_SECONDS, END_SECONDS = 300, 60


def write_model(folder: Path) -> None:
    """Write a Llama with random weights and a tokenizer that has a word for each id."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)

    weights = {"model.embed_tokens.weight": draw(VOCABULARY, HIDDEN), "lm_head.weight": draw(VOCABULARY, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.self_attn.{part}_proj.weight": draw(HIDDEN, HIDDEN) for part in "qkvo"}
        weights |= {f"{name}.mlp.{part}_proj.weight": draw(INNER, HIDDEN) for part in ("gate", "up")}
        weights[f"{name}.mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        weights |= {f"{name}.{part}_layernorm.weight": torch.ones(HIDDEN) for part in ("input", "post_attention")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "head_dim": HIDDEN // HEADS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    # The configuration is the last file, and marks the folder as complete.
    for file, content in (("tokenizer", tokenizer), ("tokenizer_config", settings), ("config", config)):
        (folder / f"{file}.json").write_text(json.dumps(content))


def load_ours(model: Path, dtype: str, compiled: bool) -> Continue:
    """Load the model into this repository's generator."""
    sys.path.insert(0, str(REPOSITORY))
    import torch

    from megatron_ladder.comm.mesh import ProcessMesh
    from megatron_ladder.generate.engine import GenerationEngine
    from megatron_ladder.generate.graph import compiled_decode
    from megatron_ladder.generate.loading import DTYPES, load_model, open_model
    from megatron_ladder.generate.requests import GenerationRequest
    from megatron_ladder.generate.sampling import GREEDY

    mesh = ProcessMesh.single()
    loaded = load_model(open_model(model, None, None), mesh, DTYPES[dtype], torch.device("cpu"), overlap=True)
    engine = GenerationEngine(loaded, mesh, decode_one=compiled_decode(loaded) if compiled else None)

    def generate(prompts: Prompts, count: int) -> Prompts:
        results = engine.generate([GenerationRequest(tuple(ids), count, GREEDY) for ids in prompts])
        return [list(result.ids) for result in results]

    return generate


def load_vllm(model: Path, dtype: str, compiled: bool) -> Continue:
    """Load the model into vLLM's engine, in this process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model),
        dtype=VLLM_DTYPES[dtype],
        enforce_eager=not compiled,
        skip_tokenizer_init=True,
        max_model_len=POSITIONS,
        max_num_seqs=32,
    )

    def generate(prompts: Prompts, count: int) -> Prompts:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate


def work(options: argparse.Namespace) -> None:
    """Answer each line of standard input, prompts and a number of tokens, with seconds and tokens; see `Worker`."""
    # Libraries print to stdout, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load = load_ours if options.program == OURS else load_vllm
    generate = load(options.model, options.dtype[0], options.program in options.compile)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        begun = time.perf_counter()
        tokens = generate(prompts, count)
        print(json.dumps([time.perf_counter() - begun, tokens]), file=answers, flush=True)


def environment(core: int) -> dict[str, str]:
    """Return the environment of both programs: one thread, and for vLLM the core, in which nothing spins."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def guard(process_group: int) -> "subprocess.Popen[bytes]":
    """Start a process that kills a process group when its pipe is closed, so also when this process is killed.

    Suspended processes cannot notice that, and a death signal of the kernel would reach only the first of them.
    """
    script = (
        "import contextlib, os, sys\n"
        "sys.stdin.read()\n"
        f"with contextlib.suppress(ProcessLookupError): os.killpg({process_group}, 9)"
    )
    return subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


class Worker:
    """A process with one of the programs, which is suspended between the calls."""

    def __init__(self, program: str, python: Path | str, model: Path, options: argparse.Namespace, dtype: str) -> None:
        """Start to load the model."""
        command = [str(python), __file__, "work", "--program", program, "--model", str(model), "--dtype", dtype]
        command += ["--compile", *options.compile]
        self._ends = contextlib.ExitStack()
        self.process = self._ends.enter_context(
            subprocess.Popen(
                command,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if options.verbose else subprocess.DEVNULL,
                env=environment(options.core) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {options.core}),
            )
        )
        self._ends.enter_context(guard(self.process.pid))
        self._read()
        os.killpg(self.process.pid, signal.SIGSTOP)

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: the process ended; use --verbose to see why")
        return line

    def generate(self, prompts: Prompts, count: int) -> tuple[float, Prompts]:
        """Return the seconds that the continuation took, and its tokens."""
        assert self.process.stdin is not None
        with resumed(self.process.pid):
            print(json.dumps([prompts, count]), file=self.process.stdin, flush=True)
            seconds, tokens = json.loads(self._read())
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        self._ends.close()


def draw_prompts(generator: random.Random, count: int, length: int) -> Prompts:
    """Return random prompts, so that no cache has seen them."""
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def report(name: str, tokens: int, rounds: Sequence[tuple[float, float]]) -> None:
    """Print both speeds and their ratio for the seconds of this package and of vLLM in each round."""
    ratios = [theirs / ours for ours, theirs in rounds]
    ours, theirs = (tokens / statistics.median(column) for column in zip(*rounds, strict=True))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"
    print(f"{name:22} {OURS} {ours:6.1f}, vLLM {theirs:6.1f} tokens/s, ratio {spread}", flush=True)


def compare_generators(model: Path, options: argparse.Namespace) -> None:
    """Print the speeds of whole batches, and how many fp32 tokens are equal."""
    for dtype in options.dtype:
        with contextlib.ExitStack() as stack:
            workers = []
            for program, python in ((OURS, sys.executable), (VLLM, options.vllm_python)):
                workers.append(Worker(program, python, model, options, dtype))
                stack.callback(workers[-1].close)
            generator = random.Random(0)
            for batch in options.batch:
                rounds, equal = [], 0
                for number in range(options.rounds + 1):
                    prompts = draw_prompts(generator, batch, options.prompt)
                    pair = [worker.generate(prompts, options.new) for worker in workers]
                    if number > 0:
                        rounds.append((pair[0][0], pair[1][0]))
                        equal += sum(one == other for one, other in zip(pair[0][1], pair[1][1], strict=True))
                report(f"{dtype}, batch {batch}", batch * options.new, rounds)
                if dtype == "fp32":
                    print(f"{'':22} equal continuations: {equal} of {batch * options.rounds}")


@contextlib.contextmanager
def resumed(process_group: int) -> Iterator[None]:
    """Let suspended processes run inside the block."""
    os.killpg(process_group, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(process_group, signal.SIGSTOP)


@contextlib.contextmanager
def running_server(command: Sequence[str], options: argparse.Namespace) -> Iterator["Server"]:
    """Run an HTTP server, and suspend it when it is ready; end it with all of its processes."""
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=environment(options.core),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=None if options.verbose else subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {options.core}),
    )
    with process, guard(process.pid):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command}: the server did not start; use --verbose to see why")
                time.sleep(0.5)
            os.killpg(process.pid, signal.SIGSTOP)
            yield Server(process.pid, port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                os.killpg(process.pid, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


class Server(NamedTuple):
    """A server that is suspended between the measurements."""

    process_group: int
    port: int


def is_ready(port: int) -> bool:
    """Return whether the server answers."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def stream(port: int, prompt: list[int], count: int) -> None:
    """Read a streamed completion to its end, and check its number of tokens."""
    parameters = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(parameters), {"Content-Type": "application/json"})
        usage, line = None, b""
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
        assert usage is not None and usage["completion_tokens"] == count, (usage, line)


def compare_servers(model: Path, options: argparse.Namespace) -> None:
    """Print the speeds of a closed set of streams: each client sends requests one after another."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {options.core} or {options.core})
    # The command `vllm` fails in the CPU build: it asks for the version of a package that has another name there.
    server = "vllm.entrypoints.openai.api_server"
    vllm = [options.vllm_python, "-m", server, "--model", str(model), "--served-model-name", "model"]
    vllm += f"--max-num-seqs {max(options.streams)} --max-model-len {POSITIONS}".split()
    vllm += ["--enforce-eager"] * (VLLM not in options.compile)
    ours = [sys.executable, str(REPOSITORY / "tools" / "generate.py"), "--serve", "--model", str(model)]
    ours += f"--model-name model --max-concurrent {max(options.streams)}".split()
    ours += ["--compile-sub-blocks"] * (OURS in options.compile)
    for dtype in options.dtype:
        with contextlib.ExitStack() as stack:
            servers = []
            for command in ([*ours, "--dtype", dtype], [*vllm, "--dtype", VLLM_DTYPES[dtype]]):
                servers.append(stack.enter_context(running_server(command, options)))
            generator = random.Random(0)
            for streams in options.streams:
                rounds = []
                for _ in range(options.rounds + 1):
                    prompts = draw_prompts(generator, streams * options.requests, options.prompt)
                    ours_seconds, theirs_seconds = (read_all(each, prompts, streams, options.new) for each in servers)
                    rounds.append((ours_seconds, theirs_seconds))
                report(f"{dtype}, {streams} streams", streams * options.requests * options.new, rounds[1:])


def read_all(server: Server, prompts: Prompts, streams: int, count: int) -> float:
    """Return the seconds until all prompts are answered, so many at a time."""
    with resumed(server.process_group), ThreadPoolExecutor(streams) as clients:
        begun = time.perf_counter()
        list(clients.map(lambda prompt: stream(server.port, prompt, count), prompts))
        return time.perf_counter() - begun


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=("generate", "serve", "work"), help="work is for the program's processes")
    parser.add_argument("--vllm-python", help="interpreter of the environment that contains vLLM")
    parser.add_argument("--dtype", nargs="+", choices=list(VLLM_DTYPES), default=list(VLLM_DTYPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="prompts of a batch (generate)")
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 32], help="concurrent streams (serve)")
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream (serve)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one that warms up")
    parser.add_argument("--compile", nargs="*", choices=(OURS, VLLM), default=[], help="use torch.compile in these")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--core", type=int, default=0, help="the core on which both programs run")
    parser.add_argument("--model", type=Path, help="folder for the model, which is written if it is missing")
    parser.add_argument("--program", choices=(OURS, VLLM), help=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true", help="print what the programs print")
    options = parser.parse_args()
    if options.mode != "work" and options.vllm_python is None:
        parser.error("--vllm-python is required")
    return options


def main() -> None:
    """Compare, or do the work of one process."""
    options = parse_options()
    if options.mode == "work":
        work(options)
        return
    # The temporary model is removed, and the programs end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            write_model(folder)
        (compare_generators if options.mode == "generate" else compare_servers)(folder, options)


if __name__ == "__main__":
    main()
