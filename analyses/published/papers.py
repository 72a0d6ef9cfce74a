"""The speedups and sizes that the papers of Quest, H2O and KIVI put into their abstracts, against bytes and against a cost model."""

from __future__ import annotations

from analyses.reckoning import AT_LEAST, AT_MOST, Sum
from analyses.saving.model import QUEST, step
from kvsim.codecs.minmax import minmax
from kvsim.cost import claims

DIM = 128


def of_papers() -> list[Sum]:
    rho = 1 / 16 + 2048 / 32768
    attention = {w: step(QUEST, 32768, w)["speedup"] for w in ("FP16", "AWQ")}
    kivi = minmax(2, "tokens", 32), minmax(2, "channels", 32)
    number = sum(x.layout(DIM)[0] for x in kivi) / (2 * DIM) + 8 * (kivi[0].layout(DIM)[1] / 32 + kivi[1].layout(DIM)[1]) / (
        2 * DIM
    )
    smaller = 16 / number
    weights = claims.LLAMA2_7B_WEIGHTS
    cache_ = weights * 1.6 / (1 - 2.6 / smaller)
    at_16k, at_32k = 19.4, 29.6  # ms, AWQ, of its figure 10
    share = 2 * (at_32k - at_16k) / at_32k
    return [
        Sum(
            "Quest, arXiv:2406.10774, 4.3",
            "self-attention is up to 7.03 times faster",
            7.03,
            1 / rho,
            "so many times fewer bytes at 32K with 2048 tokens, boxes counted: an upper end that the claim stays below",
            ".2f",
            AT_LEAST,
        ),
        Sum(
            "Quest, arXiv:2406.10774, 4.3",
            "a step with AWQ weights 2.23 times",
            2.23,
            attention["AWQ"]["speedup"],
            "predicted from the six bars with a full cache; page scan and ranking priced by their bytes alone",
            ".2f",
            low=attention["AWQ"]["low"],
            high=attention["AWQ"]["high"],
        ),
        Sum(
            "Quest, arXiv:2406.10774, 4.3",
            "and with FP16 weights 1.74 times",
            1.74,
            attention["FP16"]["speedup"],
            "as above",
            ".2f",
            low=attention["FP16"]["low"],
            high=attention["FP16"]["high"],
        ),
        Sum(
            "Quest, arXiv:2406.10774, abstract on arXiv",
            "self-attention 2.23 times and with it the step 7.03 times",
            7.03,
            1 / (1 - share + share / 2.23),
            f"{share:.0%} of a step of 32K tokens read the cache, and a step cannot gain more than its part: the two numbers are swapped there",
            ".2f",
            AT_LEAST,
        ),
        Sum(
            "H2O, arXiv:2306.14048, abstract",
            "with 20 % of the cache, 29 times the throughput of two other systems",
            29,
            1 / 0.2,
            "all that a fifth of the bytes can give, in a batch that fills the same memory or in reading time: the rest is what those "
            "systems do besides",
            ".1f",
            AT_LEAST,
        ),
        Sum(
            "H2O, arXiv:2306.14048, abstract",
            "and 3 times that of FlexGen",
            3,
            1 / 0.2,
            "possible by bytes alone",
            ".1f",
            AT_LEAST,
        ),
        Sum(
            "H2O, arXiv:2306.14048, abstract",
            "at the same batch 1.9 times faster",
            1.9,
            1 / 0.2,
            "possible by bytes alone, where 59 % of a step read the cache",
            ".1f",
            AT_LEAST,
        ),
        Sum(
            "KIVI, arXiv:2402.02750, abstract",
            "2.6 times less peak memory, weights included",
            80,
            (weights + cache_) / 1e9,
            f"GB that a 7B model takes when it is so: {number:.1f} bits a number in groups of 32 are {smaller:.2f} times fewer bytes; it "
            "fits an A100 of 80 GB",
            ".1f",
            AT_MOST,
        ),
        Sum(
            "KIVI, arXiv:2402.02750, abstract",
            "batches up to 4 times larger",
            4,
            smaller,
            "so many requests more at most, without the exact rows of the newest tokens",
            ".2f",
            AT_LEAST,
        ),
        Sum(
            "KIVI, arXiv:2402.02750, abstract",
            "2.35 to 3.47 times the throughput",
            3.47,
            smaller,
            "below what the larger batch allows",
            ".2f",
            AT_LEAST,
        ),
    ]
