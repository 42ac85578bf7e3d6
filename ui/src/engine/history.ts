// Figures over time, from consecutive snapshots.

import type { Snapshot, Step } from "./snapshot";

const MAX_SAMPLES = 180;
const MAX_STEPS = 800; // more than a wide screen has columns for

export interface Sample {
  time: number; // milliseconds of performance.now()
  outputRate: number; // tokens a second since the sample before
  promptRate: number; // computed, prefix hits not counted
  kvShare: number;
  running: number;
  waiting: number;
  acceptance: number; // accepted share of the drafts since the sample before; without drafts, that sample's
  draftsPerRow: number;
}

export interface TimedStep extends Step {
  ended: number; // milliseconds of performance.now()
}

/** Accepted share of the drafts between two snapshots; null without drafts. */
function acceptance(now: Snapshot, before: Snapshot): number | null {
  const [later, earlier] = [now.stats.speculation, before.stats.speculation];
  if (!later || !earlier || later.draft_tokens <= earlier.draft_tokens) return null;
  return (later.accepted_tokens - earlier.accepted_tokens) / (later.draft_tokens - earlier.draft_tokens);
}

export class History {
  samples: Sample[] = [];
  steps: TimedStep[] = [];
  private last: { time: number; snapshot: Snapshot } | null = null;

  add(snapshot: Snapshot, time: number): void {
    const { last } = this;
    const restarted = last !== null && snapshot.step < last.snapshot.step;
    if (restarted) this.steps = this.samples = [];
    const seen = this.steps.at(-1)?.index ?? -1;
    const fresh = snapshot.last_steps.filter((step) => step.index > seen);
    this.steps = [...this.steps, ...fresh.map((step) => ({ ...step, ended: time - step.age_seconds * 1000 }))].slice(-MAX_STEPS);
    if (last && !restarted) {
      const seconds = (time - last.time) / 1000;
      const rate = (now: number, before: number) => Math.max(now - before, 0) / seconds;
      const prompts = fresh.reduce((sum, step) => sum + step.prompt_tokens, 0);
      const sample = {
        time,
        outputRate: rate(snapshot.stats.generated_tokens, last.snapshot.stats.generated_tokens),
        promptRate: prompts / seconds,
        kvShare: snapshot.pool.used_blocks / snapshot.pool.num_blocks,
        running: snapshot.running.length,
        waiting: snapshot.waiting.length,
        acceptance: acceptance(snapshot, last.snapshot) ?? this.samples.at(-1)?.acceptance ?? 0,
        draftsPerRow: snapshot.stats.speculation?.drafts_per_row ?? 0,
      };
      this.samples = [...this.samples, sample].slice(-MAX_SAMPLES);
    }
    this.last = { time, snapshot };
  }

  /** Median duration of the last 64 steps, in milliseconds. */
  medianStep(): number | null {
    const sorted = this.steps.slice(-64).map((step) => step.seconds * 1000).sort((a, b) => a - b);
    return sorted[sorted.length >> 1] ?? null;
  }
}
