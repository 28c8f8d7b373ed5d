"""What would a job have trained on spot instances, and at what price? Run it, or read it as a notebook.

    python examples/what_if.py

It needs ten seconds and matplotlib (`pip install 'lightning-parcae[plot]'`), and writes what_if.png.
"""

from __future__ import annotations

from lightning_parcae.simulation import (
    Prices,
    plot_comparison,
    read_trace,
    read_workload,
    save_figure,
    show,
    simulate,
)


def main() -> None:
    # %% What is trained, and where: examples by name, or your own files (`parcae profile train.py` makes a profile).
    workload = read_workload("gpt-1.5b")
    trace = read_trace("aws-p3")
    print(f"{workload.name}: {len(workload.profile.configs(trace.capacity))} configurations")
    print(f"{trace.source}: {trace.statistics()}")

    # %% Several policies at once, on all cores. The same call gives the same result.
    part = trace.slice(2 * 3600.0, 5 * 3600.0)
    comparison = simulate(
        part,
        workload,
        policies=["liveput", "reactive", "checkpoint", "ondemand", "bound"],
        prices=Prices(spot=0.92, on_demand=3.06),
    )
    show(comparison)

    # %% Results are dataclasses: spans of time, migrations, samples.
    (liveput,) = comparison.of("liveput")
    longest = max(liveput.migrations, key=lambda migration: migration.pause_s)
    print(f"{len(liveput.migrations)} migrations; the longest took {longest.pause_s:.1f} s: {longest.reason}")
    print("lost, in seconds:", {cause: round(seconds, 1) for cause, seconds in liveput.lost_s.items()})

    # %% Would a warning of two minutes help, and what if a link moved only a tenth as much?
    (warned,) = simulate(part, workload, policies="liveput", notice_s=120.0).results
    (slow,) = simulate(part, workload, policies="liveput", bytes_per_s=1e8).results
    print(f"two minutes of notice: {warned.samples_per_s / liveput.samples_per_s - 1:+.1%}")
    print(f"slow links: {slow.samples_per_s / liveput.samples_per_s - 1:+.1%}")

    # %% A figure is matplotlib's, to be shown or saved.
    save_figure(plot_comparison(comparison, part), "what_if.png")


if __name__ == "__main__":  # simulations start processes, which import this file
    main()
