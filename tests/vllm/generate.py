"""One engine of vLLM, in its own environment: python generate.py JOB.json writes the tokens that it decodes greedily.

A job: model (a folder), prompts (token ids), steps (forwards after the prompt), engine (options of LLM), capture (a folder, null to
run unwatched), out (where the tokens go)."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from vllm import LLM, SamplingParams

from kvsim.capture.vllm import capturing


def main(job: dict) -> None:
    with capturing(job["capture"]) if job["capture"] else nullcontext():
        engine = LLM(job["model"], skip_tokenizer_init=True, seed=0, **job["engine"])
        how = SamplingParams(temperature=0, max_tokens=job["steps"] + 1, ignore_eos=True, detokenize=False)
        found = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], how, use_tqdm=False)
        Path(job["out"]).write_text(json.dumps([list(x.outputs[0].token_ids) for x in found]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
