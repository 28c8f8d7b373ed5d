"""What planning and cheap migration are worth: every table of docs/benchmarks.md that comes from the simulator.

    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/benchmarks/what_if.py [--quick] [--only reference,paper,...]

About ten minutes on one core; ``--quick`` takes two seeds and three profiles. Nothing but the package and its example
traces and profiles is needed, and the reference system's plans in ``tests/data``. Everything here is simulated: one
decision per minute and expected pauses, but for the last table, which runs the real coordinator and planner on a
simulated clock. ``share`` is what a policy gets of the room between reacting at once and the optimum with the whole
future known. No setting differs between models or traces.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MigrationCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.replay import membership_steps
from lightning_parcae.simulation.bootstrap import bootstrap_trace
from lightning_parcae.simulation.intervals import score_plan, simulate_intervals
from lightning_parcae.simulation.job import JobSettings, simulate_job
from lightning_parcae.simulation.systems import simulate_system
from lightning_parcae.simulation.workload import PROFILES, Workload, read_trace, read_workload

PLANS = Path(__file__).parent.parent / "data" / "parcae_plans"
HORIZONS = (4, 8, 12, 20, 30)
LINK_BYTES_PER_S = 9e8  # about what the reference system measured on 10 Gb/s
# From reference_scores.txt of the reference's data, and facts/planner.md for the optimum.
REFERENCE = {
    "gpt-1.5b_p3_gbs128_mbs1": (36.750, 34.767, 34.241, 31.780, 33.919, 28.583),
    "resnet152_gbs2048_mbs32": (2323.864, 2259.59, 2259.683, 2184.199, 2255.234, 2117.285),
}


@cache
def workload(name: str) -> Workload:
    return read_workload(name)


def variant(trace: AvailabilityTrace) -> AvailabilityTrace:
    """The trace that the reference made its plans for ResNet-152 and GPT-6.7B on: no removal at minute 508."""
    counts = trace.resample(60.0)
    counts[508:] += 1
    return AvailabilityTrace.from_counts(counts.tolist(), source=f"{trace.source}, variant")


def scaled(trace: AvailabilityTrace, requested: int) -> AvailabilityTrace:
    """The profiles end at 32 instances: scale a trace of more."""
    counts = np.rint(trace.resample(60.0) * 32 / requested).astype(int)
    return AvailabilityTrace.from_counts(counts.tolist(), source=f"{trace.source}, of {requested} to 32")


class Scores:
    """Samples per second of policies on one trace with one workload; each is simulated once."""

    def __init__(self, trace: AvailabilityTrace, name: str, cost: MigrationCost | None = None) -> None:
        self._trace, self._name, self._cost = trace, name, cost
        self._known: dict[tuple[str, int | None, float], float] = {}

    def __call__(self, policy: str, *, horizon: int | None = None, notice_s: float = 0.0) -> float:
        key = (policy, horizon, notice_s)
        if key not in self._known:
            self._known[key] = simulate_intervals(
                policy, self._trace, workload(self._name), cost=self._cost, horizon=horizon, notice_s=notice_s
            ).samples_per_s
        return self._known[key]

    def share(self, policy: str, **settings: float) -> float:
        reactive, oracle = self("reactive"), self("oracle")
        gained = self(policy, **settings) - reactive  # type: ignore[arg-type]
        assert self(policy, **settings) <= oracle * (1 + 1e-9), (policy, self._name)  # type: ignore[arg-type]
        return gained / (oracle - reactive) if oracle > reactive * (1 + 1e-9) else 0.0

    def against_reactive(self, policy: str) -> float:
        return self(policy) / self("reactive") - 1.0

    def best_stays(self) -> tuple[int, float]:
        shares = {horizon: self.share("stays", horizon=horizon) for horizon in HORIZONS}
        best = max(shares, key=lambda horizon: shares[horizon])
        return best, shares[best]


def number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def table(title: str, header: str, rows: Sequence[Sequence[str]]) -> None:
    print(f"\n### {title}\n\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def reference_rows(_: argparse.Namespace) -> None:
    rows = []
    for file, expected in REFERENCE.items():
        name = file.partition("_")[0]
        path = PLANS / f"{file}.json"
        steps = membership_steps(AvailabilityTrace.read(path))
        plans = json.loads(path.read_text())

        def shipped(kind: str, name: str = name, steps: object = steps, plans: object = plans) -> float:
            configs = [ParallelConfig(*one[kind]) for one in plans]  # type: ignore[attr-defined]
            return score_plan(kind, configs, steps, workload(name)).samples_per_s  # type: ignore[arg-type]

        ours = [
            simulate_intervals("bound", steps, workload(name)).samples_per_s,
            simulate_intervals("oracle", steps, workload(name)).samples_per_s,
            shipped("liveput-truth"),
            shipped("liveput-predict"),
            simulate_intervals("reactive", steps, workload(name)).samples_per_s,
            simulate_intervals("checkpoint", steps, workload(name)).samples_per_s,
        ]
        rows.append([name, "reference", *map(number, expected)])
        rows.append([name, "here", *map(number, ours)])
        rows.append(
            [name, "difference", *(f"{one / other - 1:+.3%}" for one, other in zip(ours, expected, strict=True))]
        )
        remade = [simulate_intervals("published", steps, workload(name), seed=seed).samples_per_s for seed in range(4)]
        text = f"{number(float(np.mean(remade)))} ({number(min(remade))} to {number(max(remade))})"
        rows.append([name, "its rules, made again, 4 seeds", "", "", "", text, "", ""])
    table(
        "The reference system's scores",
        "profile | | bound | optimum | plan with the true future | published plan | reactive | checkpoint",
        rows,
    )


def paper(options: argparse.Namespace) -> None:
    trace = read_trace("aws-p3")
    rows = []
    for name in options.profiles:
        for label, one in (("p3", trace), ("variant", variant(trace))):
            scores = Scores(one, name)
            rows.append(
                [
                    name,
                    label,
                    *(number(scores(policy)) for policy in ("bound", "oracle", "checkpoint", "published", "reactive")),
                    number(scores("stays")),
                    number(scores("liveput")),
                    f"{scores.against_reactive('liveput'):+.2%}",
                    f"{scores.share('liveput'):.0%}",
                ]
            )
    table(
        "The paper's trace, samples per second",
        "profile | trace | bound | optimum | checkpoint | Parcae as published | reactive | no events expected | "
        "**liveput** | against reactive | share",
        rows,
    )


def bootstrap(options: argparse.Namespace) -> None:
    trace = read_trace("aws-p3")
    rows = []
    for name in options.profiles:
        runs = [Scores(bootstrap_trace(trace, seed=seed, most=32), name) for seed in range(options.seeds)]
        shares = [run.share("liveput") for run in runs]
        stays = {horizon: float(np.mean([run.share("stays", horizon=horizon) for run in runs])) for horizon in HORIZONS}
        best = max(stays, key=lambda horizon: stays[horizon])
        room = np.mean([run("oracle") / run("reactive") - 1 for run in runs])
        worst = min(run.against_reactive("liveput") for run in runs)
        rows.append(
            [
                name,
                f"{room:.2%}",
                f"{np.mean(shares):.0%}",
                f"{min(shares):.0%} to {max(shares):.0%}",
                f"{worst:+.3%}",
                f"{stays[best]:.0%} (horizon {best})",
                ", ".join(f"{horizon}: {share:.0%}" for horizon, share in stays.items()),
            ]
        )
    table(
        f"{options.seeds} bootstrapped traces, 30-minute blocks",
        "profile | room | mean share | least to most | worst against reactive | best hand-tuned | hand-tuned, by its "
        "horizon",
        rows,
    )


def others(options: argparse.Namespace) -> None:
    traces = {
        "GCP V100, scaled": scaled(read_trace("gcp-v100"), 80),
        "GCP A100, scaled": scaled(read_trace("gcp-a100"), 64),
        "AWS g4dn": read_trace("aws-g4dn"),
        "GCP V100": read_trace("gcp-v100"),
        "GCP A100": read_trace("gcp-a100"),
    }
    rows = []
    for label, trace in traces.items():
        for name in options.profiles:
            scores = Scores(trace, name)
            horizon, stays = scores.best_stays()
            rows.append(
                [
                    label,
                    name,
                    number(scores("reactive")),
                    number(scores("liveput")),
                    f"{scores('oracle') / scores('reactive') - 1:.2%}",
                    f"{scores.against_reactive('liveput'):+.3%}",
                    f"{scores.share('liveput'):.0%}",
                    f"{stays:.0%} ({horizon})",
                ]
            )
    table(
        "Other traces",
        "trace | profile | reactive | liveput | room | against reactive | share | best hand-tuned (horizon)",
        rows,
    )


def notices(options: argparse.Namespace) -> None:
    rows = []
    for name in options.profiles:
        scores = Scores(read_trace("aws-p3"), name)
        told = [
            f"{number(scores('liveput', notice_s=s))}, {scores.share('liveput', notice_s=s):.0%}" for s in (0, 60, 120)
        ]
        rows.append([name, number(scores("reactive")), number(scores("oracle")), *told])
    table(
        "With notice of what comes (losses and joiners), samples per second and share",
        "profile | reactive | optimum | none | one minute | two minutes",
        rows,
    )


def measured(options: argparse.Namespace) -> None:
    trace = read_trace("aws-p3")
    kinds = {
        "announced": {"is_announced": True},
        "unannounced, rollback 2 s": {"rollback_s": 2.0},
        "unannounced, rollback 30 s": {"rollback_s": 30.0},
    }
    rows = []
    for name in options.profiles:
        reference = Scores(trace, name)
        bound = reference("bound")
        first = [name, "reference costs", f"{reference('checkpoint') / bound:.2%}"]
        rows.append([*first, *(f"{reference(policy) / bound:.2%}" for policy in ("reactive", "liveput", "oracle"))])
        for label, terms in kinds.items():
            cost = workload(name).measured_cost(bytes_per_s=LINK_BYTES_PER_S, **terms)
            scores = Scores(trace, name, cost)
            shares = (f"{scores(policy) / bound:.2%}" for policy in ("reactive", "liveput", "oracle"))
            rows.append([name, label, "", *shares])
    table(
        "Share of the zero-overhead bound, with this package's migration costs",
        "profile | costs | checkpoint | reactive | liveput | optimum",
        rows,
    )


def job(options: argparse.Namespace) -> None:
    trace = read_trace("aws-p3")
    copy = {"rollback_s": 2.0, "fallback_every_s": 0.0}  # another instance holds the state as it is
    columns = {
        "notice 30 s": {"notice_s": 30.0},
        "notice 120 s": {"notice_s": 120.0},
        "kills, copy 2 s away": copy,
        "kills": {},
        "kills, warm-up 30 s": {"warm_up_s": 30.0},
    }
    rows = []
    for name in options.profiles:
        bound = simulate_system("bound", trace, workload(name)).samples
        for policy in ("fixed", "reactive", "liveput"):
            shares = []
            for terms in columns.values():
                settings = JobSettings(policy=policy, **{"warm_up_s": 0.0, **terms})  # type: ignore[arg-type]
                shares.append(f"{simulate_job(trace, workload(name), settings).samples / bound:.2%}")
            rows.append([name, policy, *shares])
    table(
        "Share of the bound: the real coordinator and planner on a simulated clock, a checkpoint every 300 s",
        " | ".join(["profile", "policy", *columns]),
        rows,
    )


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "reference": reference_rows,
    "paper": paper,
    "bootstrap": bootstrap,
    "others": others,
    "notices": notices,
    "measured": measured,
    "job": job,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, three profiles")
    parser.add_argument("--only", default=",".join(TABLES), help="which tables")
    options = parser.parse_args()
    options.seeds = 2 if options.quick else 8
    options.profiles = ("gpt-1.5b", "bert", "resnet152") if options.quick else PROFILES
    started = time.process_time()
    for name in options.only.split(","):
        begun = time.process_time()
        TABLES[name](options)
        print(f"\n({name}: {time.process_time() - begun:.0f} s of processor time)")
    print(f"\n{time.process_time() - started:.0f} s of processor time in all")


if __name__ == "__main__":
    main()
