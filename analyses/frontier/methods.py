"""Every method that is compared: {label: expression}, {x} standing for the share of tokens that it may hold or read."""

from __future__ import annotations

SHARES = (0.25, 0.5)  # of full attention's bytes
OWN = "own bytes"  # of what codes everything

KEEPS = {
    "streaming_llm": "streaming_llm(hold=share({x}))",
    "h2o": "h2o(hold=share({x}))",
    "tova": "tova(hold=share({x}))",
    "snapkv": "snapkv(hold=share({x}))",
    "adakv": "adakv(hold=share({x}))",
    "criticalkv": "criticalkv(hold=share({x}))",
    "defensivekv": "defensivekv(hold=share({x}))",
    "knorm": "knorm(hold=share({x}))",
    "caote on h2o": "caote(hold=share({x}))",
    "caote on snapkv": "caote(hold=share({x}), base='snapkv')",
    "r_kv": "r_kv(hold=share({x}))",
    "pools": "pools(hold=share({x}))",
    "h2o with moments": "h2o(hold=share({x})) >> evicted_moments()",
    "qevict": "qevict(hold=share({x}))",
    "oracle of keeping": "oracle_keep(hold=share({x}))",
    "random tokens": "random_keep(hold=share({x}))",
}
CLOSED = {  # in a running model alone: the one needs all layers, the other statistics that the study's traces do not have
    "pyramidkv": "pyramidkv(hold=share({x}))",
    "expected_attention": "expected_attention(hold=share({x}))",
}
# These evict after the prompt alone, so later rows come on top.
ONCE = frozenset({"snapkv", "adakv", "criticalkv", "defensivekv", "caote on snapkv"})
MORE = ONCE | {"r_kv", "qevict", "h2o with moments"}  # hold other bytes than those of their budget in rows
READS = {
    "quest": "quest(read=share({x}))",
    "quest, pages of 8": "quest(read=share({x}), page=8)",
    "sphere": "quest(read=share({x}), index=sphere())",
    "digest": "quest(read=share({x}), index=digest())",
    "block mean": "quest(read=share({x}), index=block_mean())",
    "recency": "recency(read=share({x}))",
    "oracle of reading": "oracle(read=share({x}))",
    "random pages": "random_read(read=share({x}))",
}
STORES = {
    "kivi, 2 bits": "kivi(bits=2, residual=32)",
    "kivi, 4 bits": "kivi(bits=4, residual=32)",
    "zipcache": "zipcache()",
    "oscar_ots, 2 bits": "oscar_ots()",
    "turboquant k3v4": "turboquant(preset='k3v4_nc')",
    "turboquant 4 bits": "turboquant(preset='4bit_nc')",
    "int4": "int4()",
    "fp8": "fp8()",
}
