"""One vLLM engine in a process of its own: `python -m tests.engines.e2e.generate JOB.json OUT.json`.

A job holds `engine` (arguments of `vllm.LLM`), `max_tokens` and `cases`: lists of requests {prompt, options} that are
run together. OUT.json gets, per case, each request's token ids and the case's drafts, accepted drafts, verification
steps and relaxed tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

_COUNTERS = {
    "steps": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def counts(llm: LLM) -> dict[str, int]:
    found = {metric.name: metric for metric in llm.get_metrics()}
    sums = {name: int(found[metric].value) if metric in found else 0 for name, metric in _COUNTERS.items()}
    relaxed = REGISTRY.get_sample_value("eagle_mars_relaxed_tokens_total", {"model_name": llm.model_config.model})
    return {**sums, "relaxed": int(relaxed or 0)}


def run_case(llm: LLM, requests: list[dict], max_tokens: int) -> dict:
    before = counts(llm)
    sampling = [
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=request["options"] or None)
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    after = counts(llm)
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]} | {
        name: after[name] - before[name] for name in after
    }


def main(job_file: str, out_file: str) -> None:
    job = json.loads(Path(job_file).read_text("utf-8"))
    llm = LLM(disable_log_stats=False, **job["engine"])
    results = {name: run_case(llm, requests, job["max_tokens"]) for name, requests in job["cases"].items()}
    Path(out_file).write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
