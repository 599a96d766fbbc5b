"""Is the head still worth it in production? Runnable: `headwright watch --url http://server:8000`.

Reads the Prometheus metrics of a running vLLM (0.32) or SGLang (0.5.23), and says when acceptance falls below break-even or
below what the evaluation measured. Both count for ever, so that any two readings give the τ between them: vLLM drafts and
accepted tokens; SGLang, when a request ends, its verification passes and tokens (the first of each answer, which no pass has
verified, too: its own definition). SGLang's gauge, the mean of its last log interval, is used where the passes are not counted.
"""

import argparse
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headwright.configs import UserError, reason
from headwright.configs.command import clean_exit, stop
from headwright.configs.console import say
from headwright.eval.records import read_report

VLLM, SGLANG = "vllm", "sglang"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LENGTH, RATE = "sglang:spec_accept_length", "sglang:spec_accept_rate"
CALLS, TOKENS = "sglang:spec_verify_calls_total", "sglang:generation_tokens_total"
DRIFTED, UNKNOWN = 1, 3  # exit codes; 0: as it should be
LONGEST = 16 << 20  # bytes of a metrics page


@dataclass
class Reading:
    """A server's counters at one moment, all engines and models of it together. drafts: SGLang's verification passes, None
    where they are not counted. length, rate: SGLang's gauges.
    """

    engine: str
    drafts: float | None = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    places: list[float] = field(default_factory=list)
    tokens: float = 0.0
    length: float | None = None
    rate: float | None = None


@dataclass
class Window:
    """What happened between two readings. tau: None where nothing was drafted."""

    engine: str
    drafts: float | None
    tau: float | None
    acceptance_rate: float | None
    accepted_per_position: list[float]


@dataclass
class Limits:
    """τ below which an alarm is due, and why; drafts that a window must have before it is judged."""

    break_even: float | None = None
    expected_low: float | None = None
    least_drafts: int = 100


def fetch(url: str, timeout: float) -> str:
    """The metrics page of a server. Raises UserError where there is none."""
    address = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--url {url}: give http://host:port of the server")
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            page = answer.read(LONGEST + 1)
            if len(page) > LONGEST:
                raise UserError(f"{address}: longer than {LONGEST >> 20} MiB: this is no metrics page")
            return page.decode("utf-8")
    except urllib.error.HTTPError as error:
        hint = ": start SGLang with --enable-metrics" if error.code == 404 else ""
        raise UserError(f"{address}: the server answers {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"{address}: {reason(error)}") from None


def parse(text: str, model: str | None = None) -> Reading:
    """Counters out of a metrics page. Raises UserError where it is none, or holds no speculative decoding."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    gauges: dict[str, list[float]] = {}
    places: dict[int, float] = {}
    models: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                models |= {sample.labels[key] for key in sample.labels if key == "model_name"}
                if model is not None and sample.labels.get("model_name", model) != model:
                    continue
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                gauges.setdefault(sample.name, []).append(sample.value)
                if sample.name == PLACES:
                    place = int(sample.labels["position"])
                    places[place] = places.get(place, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise UserError(f"this is no page of Prometheus metrics: {reason(error)}") from None
    if model is not None and models and model not in models:
        raise UserError(f"--model {model}: the server has {', '.join(sorted(models))}")
    return reading_of(sums, gauges, places)


def reading_of(sums: dict[str, float], gauges: dict[str, list[float]], places: dict[int, float]) -> Reading:
    """By the engine whose metrics are there."""
    if DRAFTS in sums:
        accepted = [places[place] for place in sorted(places)]
        return Reading(VLLM, sums[DRAFTS], sums.get(DRAFTED, 0.0), sums.get(ACCEPTED, 0.0), accepted)
    if LENGTH in gauges:
        busy = [value for value in gauges[LENGTH] if value > 0]
        rates = [value for value in gauges.get(RATE, []) if value > 0]
        mean = sum(busy) / len(busy) if busy else None
        rate = sum(rates) / len(rates) if rates else None
        if sums.get(TOKENS, 0) > 0 and CALLS not in sums and mean is None:
            raise UserError("sglang shows no metrics of speculative decoding: was it started with a draft head?")
        return Reading(SGLANG, sums.get(CALLS), tokens=sums.get(TOKENS, 0.0), length=mean, rate=rate)
    known = next((name for name in (VLLM, SGLANG) if any(key.startswith(f"{name}:") for key in sums)), None)
    if known:
        raise UserError(f"{known} shows no metrics of speculative decoding: was it started with a draft head?")
    raise UserError("neither vLLM's nor SGLang's metrics are on this page")


def between(before: Reading | None, now: Reading) -> Window:
    """What happened since; all since the server's start, where there is no earlier reading or it was started anew."""
    if before is None or before.engine != now.engine or restarted(before, now):
        before = Reading(now.engine)
    drafts = (now.drafts or 0) - (before.drafts or 0)
    if now.engine == SGLANG and now.drafts is None:
        return Window(SGLANG, None, now.length, now.rate, [])
    if now.engine == SGLANG:
        return Window(SGLANG, drafts, (now.tokens - before.tokens) / drafts if drafts else None, now.rate, [])
    accepted, drafted = now.accepted - before.accepted, now.drafted - before.drafted
    earlier = before.places + [0.0] * len(now.places)
    shares = [(b - a) / drafts for a, b in zip(earlier, now.places)] if drafts else []
    tau = 1 + accepted / drafts if drafts else None
    return Window(VLLM, drafts, tau, accepted / drafted if drafted else None, shares)


def restarted(before: Reading, now: Reading) -> bool:
    """Whether any counter has fallen."""
    pairs = [(before.drafts or 0, now.drafts or 0), (before.drafted, now.drafted), (before.accepted, now.accepted)]
    return any(b < a for a, b in [*pairs, (before.tokens, now.tokens), *zip(before.places, now.places)])


def judge(window: Window, limits: Limits) -> dict[str, Any]:
    """The window, and whether it is as it should be: ok, drifted, or unknown (too few drafts)."""
    verdict, why = "ok", []
    few = window.drafts is not None and window.drafts < limits.least_drafts
    if window.tau is None or few:
        verdict = "unknown"
        why = [f"{window.drafts or 0:.0f} drafts, fewer than {limits.least_drafts}"]
    else:
        if limits.break_even is not None and window.tau < limits.break_even:
            why.append(
                f"τ {window.tau:.2f} is below break-even {limits.break_even:.2f}: drafting costs more than it brings"
            )
        if limits.expected_low is not None and window.tau < limits.expected_low:
            why.append(f"τ {window.tau:.2f} is below {limits.expected_low:.2f}, the low end of what was measured")
        verdict = "drifted" if why else "ok"
    return asdict(window) | {"verdict": verdict, "why": why}


def limits_of(args: argparse.Namespace) -> Limits:
    """From the command line, and the report where one is named."""
    found = Limits(args.break_even, args.expect, args.min_drafts)
    if args.report:
        report = read_report(Path(args.report))
        own = [entry for entry in report["entries"] if entry["drafter"] == report["entries"][0]["drafter"]]
        named = [entry for entry in own if entry["shape"]["name"] == args.shape] if args.shape else own
        if not named:
            raise UserError(f"--shape {args.shape}: the report has {', '.join(e['shape']['name'] for e in own)}")
        entry = named[0]
        found.expected_low = entry["acceptance_length_ci95"][0] if args.expect is None else args.expect
    if found.break_even is None and found.expected_low is None:
        raise UserError("nothing to compare with: give --break-even, --expect, or --report of a run")
    return found


def readings(args: argparse.Namespace) -> Iterator[Window]:
    """Windows: of all since the server's start at first, or of one interval after another."""
    seen: deque[Reading] = deque(maxlen=1)
    if args.interval:
        seen.append(parse(fetch(args.url, args.timeout), args.model))
    count = 0
    while args.times is None or count < args.times:
        if args.interval:
            time.sleep(args.interval)
        now = parse(fetch(args.url, args.timeout), args.model)
        yield between(seen[-1] if seen else None, now)
        seen.append(now)
        count += 1
        if not args.interval:
            return


def watch(args: argparse.Namespace) -> int:
    """Read, judge, tell; the exit code of the last window, or of the first that has drifted."""
    limits, code = limits_of(args), UNKNOWN
    for window in readings(args):
        found = judge(window, limits)
        print(json.dumps(found), flush=True) if args.json else tell(found)
        code = {"ok": 0, "drifted": DRIFTED, "unknown": UNKNOWN}[found["verdict"]]
        if code == DRIFTED and not args.keep_going:
            break
    return code


def tell(found: dict[str, Any]) -> None:
    """One window in words."""
    tau = "–" if found["tau"] is None else f"{found['tau']:.3f}"
    places = " ".join(f"{share:.0%}" for share in found["accepted_per_position"])
    more = f"; accepted at each position: {places}" if places else ""
    rate = found["acceptance_rate"]
    share = f", {rate:.0%} of the drafted tokens accepted" if rate is not None and math.isfinite(rate) else ""
    drafts = "its last interval" if found["drafts"] is None else f"{found['drafts']:.0f} drafts"
    say(f"{found['verdict']}: {found['engine']} τ {tau} over {drafts}{share}{more}")
    for why in found["why"]:
        say(f"  {why}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright watch",
        description="Read a running vLLM's or SGLang's metrics and say whether acceptance is still what was measured. "
        "Exit code 0: as it should be; 1: drifted; 3: too few drafts to tell; 2: no metrics. Without --interval one "
        "reading of all since the server's start. Dashboards: configs/grafana-vllm.json, configs/grafana-sglang.json.",
    )
    out.add_argument("--url", required=True, metavar="URL", help="the server, such as http://localhost:8000")
    out.add_argument(
        "--break-even", type=float, metavar="TAU", help="τ below which drafting does not pay on that server"
    )
    out.add_argument("--expect", type=float, metavar="TAU", help="τ below which acceptance has drifted")
    out.add_argument(
        "--report", metavar="RUN", help="take the low end of τ's interval from this run's report as --expect"
    )
    out.add_argument("--shape", metavar="NAME", help="which shape of the report is served; default: its first")
    out.add_argument(
        "--interval", type=float, metavar="S", help="seconds between readings; each interval is judged alone"
    )
    out.add_argument("--times", type=int, metavar="N", help="so many intervals; default: until one has drifted")
    out.add_argument("--keep-going", action="store_true", help="go on after a window that has drifted")
    out.add_argument(
        "--min-drafts", type=int, default=100, metavar="N", help="drafts of a window that is judged; default: 100"
    )
    out.add_argument("--model", metavar="NAME", help="only this model's metrics; default: all of the server's together")
    out.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds for one reading; default: 10")
    out.add_argument("--json", action="store_true", help="one JSON object a window, for alerts")
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        if args.interval is not None and not 0 < args.interval < math.inf:
            raise UserError(f"--interval {args.interval}: give seconds")
        code = watch(args)
    if code:
        stop("", code)


if __name__ == "__main__":
    main()
