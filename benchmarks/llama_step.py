"""Where a step of the llama_cpp backend goes: tokens a second, and the share of filling, llama_decode, sampling, the rest.

    python benchmarks/llama_step.py [--model PATH] [--sequences 1 4 8 16] [--steps 200] [--threads N] [--prompt-tokens 32]
        [--slots N] [--context TOKENS] [--modes greedy ...] [--in-slots 0 2 5 ...] [--without fillers|order] [--json]

Runs inside one process: no ring, no front, no HTTP. The text work of ``Sequence`` is counted in, as the engine's loop does it.
With ``--in-slots`` the sequences go where they would not go by themselves, and ``--without`` breaks a rule of the batch.
"""

import argparse
import itertools
import json
import random
import time

from scenario import SMOLLM2

from slimproc.engines.llama_cpp import backend as rules
from slimproc.engines.llama_cpp.backend import LlamaCppBackend
from slimproc.engines.llama_cpp.batch import Chunk
from slimproc.engines.llama_cpp.slots import Choice
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit
from slimproc.request import SamplingParams
from slimproc.settings import EngineSettings

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


def place(slots):
    """The next sequences take these slots, in this order, and then the same again."""
    due = itertools.cycle(slots)
    rules.choose_slot = lambda _prompt, _views, **_: Choice(next(due), 0)


def do_without(rule):
    """``fillers`` in single gaps, or the ``order`` of answers by their slots: then it is that in which they came."""
    plan = rules.plan_answers
    if rule == "fillers":
        rules.plan_answers = lambda slots, **others: plan(slots, **others | {"can_fill": lambda _: False})
    else:
        rules.plan_answers = lambda slots, **_: [Chunk(slot, 1) for slot in slots]


def measure(backend, info, *, sequences, steps, prompt_tokens, sampling):
    """One row: tokens a second, milliseconds a step and its parts, over ``steps`` steps in which all decode."""
    words = random.Random(1)
    members = []
    for rid in range(sequences):
        prompt = [words.randrange(info.vocab_size // 8, info.vocab_size) for _ in range(prompt_tokens)]
        members.append(Sequence(Submit(rid=rid, prompt=prompt, sampling=sampling), prompt, info.context))
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
    return {
        "sequences": sequences,
        "tokens_per_s": tokens / seconds,
        "ms": seconds / steps * 1000,
        "parts": {part: spent / seconds for part, spent in backend.parts.items()},
    }


def advance(events):
    for event in events:
        # An end of the text is only one more token here: the batch shall stay as large as it is.
        event.sequence.advance(event.piece, end=False)
    return len(events)


def main():
    options = parse()
    slots = options.slots or max(options.sequences)
    if options.in_slots:
        place(options.in_slots)
    if options.without:
        do_without(options.without)
    context = options.context or options.prompt_tokens + options.steps + 600
    settings = EngineSettings(
        model="bench", backend="llama_cpp", path=options.model, slots=slots, context=context, threads=options.threads
    )
    backend = Clocked(settings)
    info = backend.load(lambda _fraction: None)
    show = show_json if options.json else show_text
    if not options.json:
        print(f"{info.details['description']}, {info.details['threads']} threads, {options.steps} steps a row")
        print(HEADING)
    for mode in options.modes:
        for sequences in options.sequences:
            amounts = {"sequences": sequences, "steps": options.steps, "prompt_tokens": options.prompt_tokens}
            show(mode, measure(backend, info, **amounts, sampling=MODES[mode]))
    backend.close()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--slots", type=int, help="as many as the most sequences, without it")
    parser.add_argument("--context", type=int, help="tokens of a slot; somewhat more than is needed, without it")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--in-slots", type=int, nargs="+", help="as many as sequences, in the order in which they come")
    parser.add_argument("--without", choices=["fillers", "order"])
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    return parser.parse_args()


HEADING = (
    f"{'mode':14} {'sequences':>9} {'tokens/s':>9} {'ms/step':>8} {'decode':>7} {'fill':>6} {'sample':>7} {'rest':>6}"
)


def show_text(mode, row):
    parts = row["parts"]
    rest = 1 - sum(parts.values())
    print(
        f"{mode:14} {row['sequences']:9} {row['tokens_per_s']:9.1f} {row['ms']:8.2f} {parts['decode']:7.1%}"
        f" {parts['fill']:6.2%} {parts['sample']:7.2%} {rest:6.2%}",
        flush=True,
    )


def show_json(mode, row):
    print(json.dumps({"mode": mode} | row), flush=True)


if __name__ == "__main__":
    main()
