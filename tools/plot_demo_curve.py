"""Draws the demo model's training curve: docs/training_curve.png, from jpaged/demo_model/training_curve.json.

    python tools/plot_demo_curve.py      # needs matplotlib
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    record = json.loads((ROOT / "jpaged" / "demo_model" / "training_curve.json").read_text("utf-8"))
    curve, recipe = record["curve"], record["recipe"]
    millions = [point["tokens"] / 1e6 for point in curve]
    decay = (recipe["steps"] - int(recipe["steps"] * recipe["decay_share"])) * recipe["batch_tokens"] / 1e6

    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=100)
    axes.plot(millions, [point["train_loss"] for point in curve], label="training", linewidth=1.2)
    axes.plot(millions, [point["held_out_loss"] for point in curve], label="held out", linewidth=1.6)
    axes.axvline(decay, color="grey", linewidth=0.8, linestyle="--")
    axes.annotate("decay begins", (decay, axes.get_ylim()[1]), (3, -10), textcoords="offset points", fontsize=8)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "training_curve.png")


if __name__ == "__main__":
    main()
