"""Policies that between them use every part of the engine."""

from __future__ import annotations

STATELESS = [
    "full()",
    "quest(read=pages(3), page=4, index=boxes(n=2))",
    "quest(read=pages(5), page=4, index=boxes(n=2))",  # another budget, the same ranking
    'quest(read=share(0.3), page=4, heads="share", sinks=3, recent=6)',
    'quest(read=pages(3), page=4, heads="max", tail="free")',
    'quest(read=pages(3), page=4, heads="mean")',
    'quest(read=pages(3), page=4, heads="softmax_mean")',
    'quest(read=pages(3), page=4, heads="split", private=1)',
    "quest(read=pages(3), page=4, refresh=5)",
    "quest(read=exact(r=5), page=4)",
    "quest(read=mass(eps=0.2, cap=pages(9)), page=4)",
    "quest(read=top_p(p=0.7), page=4)",
    'oracle(read=pages(3), page=4, by="mass")',
    'oracle(read=share(0.1), page=4, by="mass")',
    'oracle(read=pages(3), page=4, by="logit", tail="forced")',
    "recency(read=pages(3), page=4)",
    "recency(read=pages(3), page=4, sinks=1)",
    "random_read(read=pages(3), page=4, seed=5)",
    "dsa(read=tokens(7), sinks=1)",
    "sparda_proxy(read=pages(3), page=4)",
]
BLIND = [
    "streaming_llm(sinks=2, hold=tokens(17))",
    "snapkv(hold=tokens(20), window=5)",
    "adakv(hold=tokens(20), window=5)",
    'adakv(hold=tokens(20), window=5, alpha=0.5, ada_mode="safeguard")',
    "pyramidkv(hold=tokens(20), window=5)",
    "criticalkv(hold=tokens(20), window=5)",
    'criticalkv(hold=tokens(20), window=5, base="adakv", compat=True)',
    "defensivekv(hold=tokens(20), window=5)",
    'defensivekv(hold=tokens(20), window=5, scope="model", compat=True)',
    "knorm(hold=tokens(15))",
    "random_keep(hold=tokens(15), seed=3)",
    "r_kv(hold=tokens(20), window=5, period=6)",
    "expected_attention(hold=tokens(20))",
]
SEEING = ["oracle_keep(hold=tokens(15))"]  # the future: a shorter trace has another one
WATCHING = [
    "h2o(hold=tokens(18), recent=0.3, sinks=1)",
    'h2o(hold=tokens(18), decay=0.9, norm="queries")',
    "pools(hold=tokens(18), sinks=2, recent=5, heavy=4)",
    "tova(hold=tokens(15))",
    "qevict(hold=share(0.5), sinks=2, window=4, period=3, recent=tokens(6))",
    'qevict(hold=share(0.5), sinks=2, window=4, period=3, recent=6, offset=1, scope="head", score="defensive", requantise="each")',
]
CHAINS = [
    "kivi(group=2, residual=8)",
    "streaming_llm(sinks=2, hold=tokens(17)) >> quest(read=pages(2), page=4)",
    "streaming_llm(sinks=2, hold=tokens(17)) >> kivi(group=2, residual=4) >> oracle(read=pages(2), page=4)",
    "h2o(hold=tokens(24)) >> quest(read=pages(2), page=4)",
    "h2o(hold=tokens(24)) >> kivi(group=2, residual=4) >> oracle(read=pages(3), page=4)",
    'tova(hold=tokens(20)) >> quest(read=pages(3), page=4, heads="share", refresh=3)',
    "adakv(hold=tokens(20), window=5) >> quest(read=mass(eps=0.3), page=4)",
    "snapkv(hold=tokens(20), window=5) >> kivi(group=2, residual=8)",
    "h2o(hold=tokens(24)) >> zipcache(period=4, window=6) >> quest(read=pages(3), page=4)",
]
STORES = [
    "fp8(residual=3)",
    'oscar_cov(sinks=2, recent=6, rotate="none")',  # some lanes have values of 6 numbers
    'h2o(hold=tokens(24)) >> oscar_ots(group=2, residual=8, rotate="none") >> quest(read=pages(3), page=4)',
    "turboquant()",
    "zipcache(period=5, window=6)",
    'zipcache(period=7, probes="columns", divisor="tokens") >> quest(read=pages(3), page=4)',
]
HOSTED = [  # of whose rows only some are on the device
    'offload(device=pages(3), prefetch="last") >> quest(read=pages(3), page=4)',
    'offload(device=pages(2), evict="score", summaries="host") >> quest(read=mass(eps=0.2), page=4)',
    'h2o(hold=tokens(24)) >> offload(device=pages(3), prefetch="neighbour") >> quest(read=pages(2), page=4)',
]
EVICTING = BLIND + SEEING + WATCHING + [c for c in CHAINS if not c.startswith("kivi")]
ALL = STATELESS + BLIND + SEEING + WATCHING + CHAINS + STORES
