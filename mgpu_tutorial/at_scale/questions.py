"""Twenty-five estimates: how long, how much memory, how many bytes. Answers are computed.

Round numbers are what such a question is about: within a fifth of the answer is near enough.
"""

import html
from typing import NamedTuple

from mgpu_tutorial.at_scale.failures import DAY, HOUR, between_failures
from mgpu_tutorial.shared.cost_model.failures import best_interval

RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Question(NamedTuple):
    """A question, the number that answers it, its unit, and how to get there."""

    text: str
    answer: float
    unit: str
    working: str


H100, A100 = 989e12, 312e12  # operations per second at peak, in 16 bits

QUESTIONS = (
    # Compute
    Question("How many operations does it take to train 7 billion parameters on 2 trillion "
             "tokens?", 6 * 7e9 * 2e12, "FLOP", "6 per parameter and token"),
    Question("How many days is that on 512 H100s at an MFU of 40 %?",
             6 * 7e9 * 2e12 / (512 * H100 * 0.4) / DAY, "days",
             "the operations over 512 · 989·10¹² · 0.4 per second"),
    Question("At 2 dollars per GPU-hour, what does that cost?",
             6 * 7e9 * 2e12 / (H100 * 0.4) / HOUR * 2, "dollars",
             "GPU hours, which do not depend on the number of GPUs, times 2"),
    Question("A GPU trains 70 billion parameters at 400 TFLOP/s. How many tokens per second?",
             400e12 / (6 * 70e9), "tokens/s", "400·10¹² / (6 · 70·10⁹)"),
    Question("An A100 trains 6.7 billion parameters at 3,700 tokens per second. What is its "
             "MFU, leaving out attention?", 3700 * 6 * 6.7e9 / A100, "",
             "3,700 · 6 · 6.7·10⁹ / 312·10¹²"),
    Question("If every layer is computed again, which HFU goes with an MFU of 0.45?",
             0.45 * 4 / 3, "", "four forwards' worth in place of three"),
    Question("With width 4,096, and four times that in the perceptron, at which sequence "
             "length does attention (all pairs) take as many operations as the matrices?",
             6 * 4096, "tokens", "4 s h = 24 h², so s = 6 h"),
    # Memory
    Question("How much memory do weights, gradients and Adam of 13 billion parameters take "
             "at 16 bytes each?", 13e9 * 16 / 1e9, "GB", "13 · 16"),
    Question("And per GPU with ZeRO 3 on 64 GPUs?", 13e9 * 16 / 64 / 1e9, "GB", "208 / 64"),
    Question("And with ZeRO 1 on 64 GPUs (2 + 2 bytes stay, 12 are cut)?",
             13e9 * (4 + 12 / 64) / 1e9, "GB", "13 · (4 + 12/64)"),
    Question("How much does a GPU hold if 40 layers of width 5,120 keep 34 bytes per number, "
             "for one sequence of 2,048?", 34 * 2048 * 5120 * 40 / 1e9, "GB",
             "34 · s · h · layers"),
    Question("And with full recomputation, which keeps 2 bytes per number and layer?",
             2 * 2048 * 5120 * 40 / 1e9, "GB", "2 · s · h · layers, 17 times less"),
    Question("How large are the logits of 16,384 tokens with a vocabulary of 128,256, in "
             "float32?", 16_384 * 128_256 * 4 / 1e9, "GB", "16,384 · 128,256 · 4"),
    Question("How large is a checkpoint of 405 billion parameters with Adam: master weights "
             "and two moments in float32?", 405e9 * 12 / 1e12, "TB", "405·10⁹ · 12"),
    # Pipelines
    Question("What share of the useful time does the bubble add with 16 stages and 64 "
             "micro-batches?", 15 / 64, "", "(p − 1) / m"),
    Question("And with four chunks per rank?", 15 / 64 / 4, "", "(p − 1) / (v m)"),
    Question("A batch of 2,048 sequences, 128 replicas, micro-batches of 2: how many "
             "micro-batches does each pipeline have?", 2048 / 128 / 2, "", "2,048 / 128 / 2"),
    Question("A run of 16 stages makes 400 TFLOP/s with 64 micro-batches. How many with 16, "
             "if only the bubble changes?", 400 * (1 + 15 / 64) / (1 + 15 / 16), "TFLOP/s",
             "400 · (1 + 15/64) / (1 + 15/16)"),
    # Messages
    Question("How many bytes does each GPU send in an all-reduce of 10 GB over 100 GPUs, as "
             "a ring?", 2 * 99 / 100 * 10, "GB", "2 (N − 1)/N of it"),
    Question("How long does that take at 20 GB/s?", 2 * 99 / 100 * 10 / 20, "s",
             "19.8 GB / 20 GB/s"),
    Question("ZeRO 3 moves 2-byte parameters twice and 2-byte gradients once. How long does "
             "that take for 70 billion, if a node's eight GPUs share 140 GB/s?",
             3 * 2 * 70e9 / 140e9, "s", "420 GB / 140 GB/s"),
    Question("How many bytes does one GPU send in the all-reduce of one micro-batch of 2,048 "
             "tokens, hidden 12,288, 16 bits, in a tensor-parallel group of 8?",
             2 * 7 / 8 * 2 * 2048 * 12288 / 1e6, "MB", "2 · 7/8 · 2 · s · h"),
    Question("A ring of 1,024 with a latency of 5 µs: what does the latency alone cost an "
             "all-reduce?", 2 * 1023 * 5e-3, "ms", "2 · 1,023 steps of 5 µs"),
    # Failures
    Question("How many hours lie between two interruptions of 1,024 GPUs, if 16,384 have 419 "
             "in 54 days?", between_failures(1024) / HOUR, "h",
             "54 · 24 / 419 hours, times 16"),
    Question("How often should 16,384 such GPUs save, if it takes 60 seconds?",
             best_interval(60, between_failures(16_384)) / 60, "min",
             "√(2 · 60 s · 3.1 h), by Young"),
)  # fmt: skip


class Cards:
    """All questions, each with its answer folded; on paper the answers come at the end."""

    def __repr__(self) -> str:
        asked = [f"{i}. {asked_text(q)}" for i, q in enumerate(QUESTIONS, 1)]
        answers = [f"{i}. {answer_text(q)}: {q.working}" for i, q in enumerate(QUESTIONS, 1)]
        return "\n".join([*asked, "", "Answers", *answers])

    def _repr_html_(self) -> str:
        items = []
        for i, question in enumerate(QUESTIONS, 1):
            text = html.escape(asked_text(question))
            answer = html.escape(answer_text(question))
            working = html.escape(question.working)
            items.append(
                f"<details><summary>{i}. {text}</summary>"
                f"<p style='margin:0 0 6px 24px'><b>{answer}</b> ({working})</p></details>"
            )
        return "".join(items)


def asked_text(question: Question) -> str:
    """The question, with the unit of its answer."""
    return f"{question.text} [{question.unit}]" if question.unit else question.text


def answer_text(question: Question) -> str:
    """The answer with its unit, in three digits."""
    number = question.answer
    text = f"{number:,.3g}" if abs(number) < 1000 else f"{number:,.0f}"
    if abs(number) >= 1e7:
        digits, exponent = f"{number:.2g}".split("e+")
        text = f"{digits}·10{str(int(exponent)).translate(RAISED)}"
    return f"{text} {question.unit}".rstrip()


def cards() -> Cards:
    """The questions, to be shown by the notebook."""
    return Cards()
