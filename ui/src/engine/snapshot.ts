// The answer of GET /admin/inspect: jpaged.EngineSnapshot, with the fields that this page reads.

export interface BlockOwner {
  request_id: string;
  sample: number;
  group: number;
  index: number;
}

export interface Block {
  block: number;
  ref_count: number;
  owners: BlockOwner[];
  prefix_hash: string | null;
  last_use: number | null;
  tokens: number;
}

export interface EngineRequest {
  request_id: string;
  sample: number;
  status: "prefill" | "decode" | "waiting" | "preempted";
  row: number | null;
  prompt_tokens: number;
  output_tokens: number;
  computed_tokens: number;
  cached_tokens: number;
  num_blocks: number;
  preemptions: number;
  age_seconds: number;
  adapter?: string | null; // name of the LoRA adapter
}

export interface Step {
  index: number;
  rows: number;
  decodes: number;
  prompt_tokens: number;
  seconds: number;
  age_seconds: number;
  drafts?: number; // checked in this step, with speculative decoding
}

/** Speculative decoding: counters since the start. */
export interface Speculation {
  num_speculative_tokens: number;
  drafts: number;
  draft_tokens: number;
  accepted_tokens: number;
  drafts_per_row: number;
}

export interface Snapshot {
  step: number;
  pool: {
    num_blocks: number;
    block_size: number;
    used_blocks: number;
    shared_blocks: number;
    cached_blocks: number;
    empty_blocks: number;
    references: number;
    used_tokens: number;
  };
  blocks: Block[];
  running: EngineRequest[];
  waiting: EngineRequest[];
  max_num_seqs: number;
  max_num_batched_tokens: number;
  stats: {
    prompt_tokens: number;
    prefix_hit_tokens: number;
    generated_tokens: number;
    finished_requests: number;
    preemptions: number;
    steps: number;
    speculation?: Speculation | null;
  };
  last_steps: Step[];
  weight_version?: number | string; // 0: the weights of the start
  engine?: number; // index, with data_parallel_size
  num_engines?: number;
}
