// One prompt and its answer.

import { useState } from "preact/hooks";
import { count, milliseconds } from "../format";
import { perplexity, type Answer } from "./answer";
import type { Exchange } from "./chat";
import { Markdown } from "./markdown";
import { Tokens } from "./tokens";

export type View = "text" | "tokens";

interface Props {
  exchange: Exchange;
  view: View;
  retry: () => void;
  continued?: () => void;
}

export function ExchangeView({ exchange, view, retry, continued }: Props) {
  const { mode, prompt, answer } = exchange;
  const tokens = view === "tokens" && answer.tokens.length > 0;
  return (
    <article class={`exchange ${mode}`} data-state={answer.state}>
      <p class="prompt">{prompt}</p>
      <div class="answer">
        {answer.reasoning && (
          <details class="fold">
            <summary>Reasoning, {count(answer.reasoning.length)} characters</summary>
            <p>{answer.reasoning}</p>
          </details>
        )}
        {tokens ? <Tokens tokens={answer.tokens} /> : mode === "chat" ? <Markdown text={answer.text} /> : <p class="plain">{answer.text}</p>}
        {answer.toolCalls.map((call, index) => (
          <details class="fold" key={index}>
            <summary>
              Tool call <code>{call.name}</code>
            </summary>
            <pre>{indented(call.arguments)}</pre>
          </details>
        ))}
        {answer.state === "running" && <span class="caret" aria-label="running" />}
      </div>
      {answer.error && (
        <p class="refusal" role="alert">
          {answer.error}
        </p>
      )}
      <Footer exchange={exchange} retry={retry} continued={continued} />
    </article>
  );
}

function Footer({ exchange, retry, continued }: Omit<Props, "view">) {
  const { answer } = exchange;
  const [copied, setCopied] = useState("");
  const copy = (what: string, text: string) =>
    navigator.clipboard?.writeText(text).then(() => {
      setCopied(what);
      setTimeout(() => setCopied(""), 1500);
    });
  return (
    <footer>
      <dl>
        {facts(answer).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {answer.state !== "running" && (
        <div class="actions">
          {continued && answer.text && <button class="quiet" onClick={continued}>Continue</button>}
          <button class="quiet" onClick={retry}>Retry</button>
          <button class="quiet" onClick={() => copy("text", answer.text)}>{copied === "text" ? "Copied" : "Copy"}</button>
          <button class="quiet" onClick={() => copy("curl", curl(exchange))}>{copied === "curl" ? "Copied" : "curl"}</button>
        </div>
      )}
    </footer>
  );
}

function facts(answer: Answer): [string, string][] {
  const shown: [string, string][] = [];
  if (answer.state === "stopped") shown.push(["end", "stopped"]);
  else if (answer.finishReason) shown.push(["end", answer.finishReason]);
  if (answer.usage) {
    const { prompt_tokens, prompt_tokens_details, completion_tokens } = answer.usage;
    const cached = prompt_tokens_details.cached_tokens;
    shown.push(["prompt", count(prompt_tokens) + (cached ? `, ${count(cached)} cached` : "")]);
    shown.push(["tokens", count(completion_tokens)]);
  }
  if (answer.first !== null) {
    shown.push(["first", milliseconds(answer.first - answer.began)]);
    const tokens = answer.usage?.completion_tokens ?? answer.tokens.length;
    const seconds = ((answer.ended ?? performance.now()) - answer.first) / 1000;
    // Tokens that arrive at once, as after a wait for a program, show no speed.
    if (tokens > 1 && seconds > 0.05) shown.push(["speed", `${((tokens - 1) / seconds).toFixed(1)} tok/s`]);
  }
  const value = answer.state === "running" ? null : perplexity(answer.tokens);
  if (value !== null) shown.push(["perplexity", value.toFixed(2)]);
  return shown;
}

function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still growing, or cut off
  }
}

/** The request as a command. The key is a variable: it must not end in a shell's history. */
function curl({ mode, body }: Exchange): string {
  const url = new URL(`../v1/${mode === "chat" ? "chat/completions" : "completions"}`, document.baseURI);
  const json = JSON.stringify({ ...body, stream: false, stream_options: undefined }).replaceAll("'", "'\\''");
  return `curl ${url} \\\n  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" \\\n  -d '${json}'`;
}
