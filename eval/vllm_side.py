"""What the real vLLM counts: run by the engine's own python, imports nothing of Headwright.

Reads {"jobs": [{"arguments", "prompts", "max_tokens", "dtype", "context"}]} from stdin; the last line of stdout is {"version",
"answers"} with, for each job, {"texts", "drafts", "accepted_per_pos", "seconds"} or {"error"}. `arguments` are those of
vllm.LLM that name target and head. Prompts and texts are token ids; decoding is greedy and goes on after end tokens, so that
both sides do the same work.

Every engine gets a process of its own, forked after the slow import: engines leave state behind.
"""

import json
import os
import sys
import tempfile
import time
import traceback

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for key, value in SETTINGS.items():
    os.environ.setdefault(key, value)
sys.path[:] = [
    path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))
]  # our modules are no libraries

import vllm  # noqa: E402, the settings must stand before


def run(job: dict) -> dict:
    """One engine, all prompts at once."""
    begun = time.perf_counter()
    engine = vllm.LLM(
        dtype=job.get("dtype", "float32"),
        max_model_len=job["context"],
        max_num_seqs=job.get("batch", 4),
        gpu_memory_utilization=job.get("memory", 0.3),
        enforce_eager=job.get("eager", True),
        enable_prefix_caching=False,
        disable_log_stats=False,
        **job["arguments"],
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {"texts": texts, "seconds": time.perf_counter() - begun} | counters(engine)


def counters(engine: "vllm.LLM") -> dict:
    """Draft cycles, and accepted drafts by position."""
    found = {metric.name: metric for metric in engine.get_metrics() if metric.name.startswith("vllm:spec_decode")}
    if not found:
        return {"drafts": 0, "accepted_per_pos": []}
    return {
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted_per_pos": list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def apart(job: dict) -> dict:
    """`run` in a process of its own; an engine that fails, fails alone."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = os.fork()
        if child == 0:
            try:
                found = run(job)
            except BaseException as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            with open(answer.name, "w") as file:
                json.dump(found, file)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        text = answer.read()
    return json.loads(text) if text else {"error": f"the engine's process ended with status {status}"}


def main() -> None:
    """All jobs, one after another. Whatever engines print goes to stderr."""
    jobs = json.load(sys.stdin)["jobs"]
    out = os.dup(1)
    os.dup2(2, 1)
    answers = []
    for number, job in enumerate(jobs):
        answers.append(apart(job))
        print(f"[{number + 1}/{len(jobs)}] {job.get('name', '')}: {summary(answers[-1])}", file=sys.stderr, flush=True)
    os.write(out, (json.dumps({"version": vllm.__version__, "answers": answers}) + "\n").encode())


def summary(answer: dict) -> str:
    """One line about a job."""
    if "error" in answer:
        return answer["error"].splitlines()[0]
    return f"{answer['drafts']} drafts, accepted {answer['accepted_per_pos']}, {answer['seconds']:.0f} s"


if __name__ == "__main__":
    main()
