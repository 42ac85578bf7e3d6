// An answer while it grows: text, reasoning, tool calls, tokens and times. Both routes' stream events are read here.

import type { Usage } from "../api";

export interface Alternative {
  text: string;
  logprob: number;
}

export interface Token extends Alternative {
  top: Alternative[]; // most likely first; may lack the token itself
}

export interface ToolCall {
  name: string;
  arguments: string;
}

export interface Answer {
  text: string;
  reasoning: string;
  toolCalls: ToolCall[];
  tokens: Token[];
  state: "running" | "done" | "stopped" | "failed";
  finishReason: string | null;
  error: string | null;
  usage: Usage | null;
  began: number; // milliseconds of performance.now()
  first: number | null;
  ended: number | null;
}

export const newAnswer = (): Answer => ({
  text: "", reasoning: "", toolCalls: [], tokens: [], state: "running", finishReason: null, error: null, usage: null,
  began: performance.now(), first: null, ended: null,
});

interface ChatLogprob extends RawAlternative {
  top_logprobs: RawAlternative[];
}

interface RawAlternative {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: number[];
  top_logprobs: Record<string, number>[];
}

export interface StreamEvent {
  usage?: Usage | null;
  choices: {
    finish_reason: string | null;
    text?: string; // of /v1/completions
    delta?: {
      content?: string;
      reasoning?: string;
      tool_calls?: { index: number; function: { name?: string; arguments?: string } }[];
    };
    logprobs?: { content?: ChatLogprob[] } | CompletionLogprobs | null;
  }[];
}

/** Add one event of a stream to its answer. */
export function addEvent(answer: Answer, event: StreamEvent): void {
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return;
  answer.first ??= performance.now();
  answer.text += choice.text ?? choice.delta?.content ?? "";
  answer.reasoning += choice.delta?.reasoning ?? "";
  for (const part of choice.delta?.tool_calls ?? []) {
    const call = (answer.toolCalls[part.index] ??= { name: "", arguments: "" });
    call.name += part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
  }
  if (choice.logprobs) answer.tokens.push(...tokensOf(choice.logprobs));
  if (choice.finish_reason) answer.finishReason = choice.finish_reason;
}

function tokensOf(logprobs: { content?: ChatLogprob[] } | CompletionLogprobs): Token[] {
  if ("tokens" in logprobs) {
    return logprobs.tokens.map((text, i) => {
      const top = Object.entries(logprobs.top_logprobs[i] ?? {}).map(([text, logprob]) => ({ text, logprob }));
      return { text, logprob: logprobs.token_logprobs[i]!, top: top.sort((a, b) => b.logprob - a.logprob) };
    });
  }
  return (logprobs.content ?? []).map(({ token, logprob, top_logprobs }) => ({
    text: token,
    logprob,
    top: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
  }));
}

// A part of a character: bytes:\xf0\x9f from one route, \xf0\x9f from the other.
const PARTIAL = /^(?:bytes:)?((?:\\x[0-9a-f]{2})+)$/;

/** The text that each token shows. The first of several tokens that share a character shows it, the others are empty. */
export function shownTexts(tokens: Token[]): string[] {
  const shown: string[] = [];
  for (let i = 0; i < tokens.length; i++) {
    const bytes: number[] = [];
    const first = i;
    for (let part; i < tokens.length && (part = PARTIAL.exec(tokens[i]!.text)); i++) {
      bytes.push(...part[1]!.match(/[0-9a-f]{2}/g)!.map((hex) => parseInt(hex, 16)));
    }
    if (i > first) {
      shown.push(new TextDecoder().decode(new Uint8Array(bytes)), ...Array(i - first - 1).fill(""));
      i--;
    } else {
      shown.push(tokens[i]!.text);
    }
  }
  return shown;
}

/** exp of the mean negative log-probability of the sampled tokens. */
export function perplexity(tokens: Token[]): number | null {
  if (!tokens.length) return null;
  return Math.exp(-tokens.reduce((sum, token) => sum + token.logprob, 0) / tokens.length);
}
