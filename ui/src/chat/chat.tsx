// The playground: a conversation, or completions of plain prompts, with the settings beside it.

import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { ApiError, stream, type ModelCard } from "../api";
import { addEvent, newAnswer, type Answer, type StreamEvent } from "./answer";
import { ExchangeView, type View } from "./exchange";
import { SettingsPanel } from "./panel";
import {
  chatBody, completionBody, completionTokens, FieldError, newSettings, type Message, type Mode, type Settings,
} from "./settings";

export interface Exchange {
  id: number;
  mode: Mode;
  prompt: string;
  body: Record<string, unknown>;
  answer: Answer;
}

interface Refusal {
  param: string | null;
  message: string;
}

interface Props {
  models: ModelCard[];
  apiKey: string;
  openKeys: () => void;
}

const NO_TEMPLATE = /no chat template/;
const NEAR_END = 80; // pixels from the end at which the page keeps following an answer

export function ChatView({ models, apiKey, openKeys }: Props) {
  const [settings, setSettings] = useState<Settings>(newSettings);
  const [exchanges, setExchanges] = useState<Exchange[]>([]);
  const [draft, setDraft] = useState("");
  const [refusal, setRefusal] = useState<Refusal | null>(null);
  const [notice, setNotice] = useState("");
  const [views, setViews] = useState<Record<Mode, View>>({ chat: "text", completion: "tokens" });
  const [panelOpen, setPanelOpen] = useState(false);
  const [, redraw] = useReducer((tick: number) => tick + 1, 0);
  const running = useRef<AbortController | null>(null);
  const number = useRef(0);
  const input = useRef<HTMLTextAreaElement>(null);
  const log = useRef<HTMLDivElement>(null);

  const { mode } = settings;
  const shown = useMemo(() => exchanges.filter((exchange) => exchange.mode === mode), [exchanges, mode]);
  const maxModelLen = models[0]?.max_model_len ?? 512;
  const stop = () => running.current?.abort();
  /** Put a suggestion into the field. For the demo model also the settings that suit it, where the reader has none. */
  const pick = (text: string) => {
    setDraft(text);
    input.current?.focus();
    if (models[0]?.id !== DEMO) return;
    setSettings((now) => ({ ...now, mode: "completion", numbers: { ...DEMO_NUMBERS, ...given(now.numbers) }, stop: now.stop || DEMO_STOP }));
  };
  const change = (part: Partial<Settings>) => setSettings((now) => ({ ...now, ...part }));

  useEffect(() => {
    const escape = (event: KeyboardEvent) => {
      if (event.key === "Escape") stop();
    };
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, []);

  // Follow the answer, unless the reader has scrolled up.
  const following = useRef(true);
  useEffect(() => {
    const box = log.current!;
    if (following.current) box.scrollTop = box.scrollHeight;
  });

  const requestBody = (prompt: string, before: Exchange[], asked: Mode) => {
    if (asked === "completion") return completionBody(settings, prompt, completionTokens(maxModelLen));
    const messages = before.flatMap((old): Message[] => [
      { role: "user", content: old.prompt },
      { role: "assistant", content: old.answer.text },
    ]);
    return chatBody(settings, [...messages, { role: "user", content: prompt }]);
  };

  async function run(prompt: string, before: Exchange[], asked: Mode) {
    setRefusal(null);
    setNotice("");
    let body;
    try {
      body = requestBody(prompt, before, asked);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      setRefusal({ param: error.param, message: error.message });
      setPanelOpen(true);
      return false;
    }
    const exchange: Exchange = { id: number.current++, mode: asked, prompt, body, answer: newAnswer() };
    const others = exchanges.filter((old) => old.mode !== asked);
    setExchanges([...others, ...before, exchange]);
    following.current = true;
    await follow(exchange, [...others, ...before]);
    return true;
  }

  async function follow(exchange: Exchange, before: Exchange[]) {
    const { answer } = exchange;
    const control = new AbortController();
    running.current = control;
    let frame = 0;
    const later = () => (frame ||= requestAnimationFrame(() => ((frame = 0), redraw(undefined))));
    const path = exchange.mode === "chat" ? "v1/chat/completions" : "v1/completions";
    try {
      for await (const event of stream<StreamEvent>(path, exchange.body, apiKey, control.signal)) {
        addEvent(answer, event);
        later();
      }
      answer.state = "done";
      setNotice(`Answer complete, ${answer.usage?.completion_tokens ?? answer.tokens.length} tokens.`);
    } catch (error) {
      if (control.signal.aborted) {
        answer.state = "stopped";
        setNotice("Stopped.");
      } else if (error instanceof ApiError) {
        if (error.status === 401) openKeys();
        if (answer.first === null) {
          // Refused before anything ran: the prompt goes back to its field, and the error to the field that it names.
          setExchanges(before);
          setDraft(exchange.prompt);
          setRefusal({ param: error.param, message: error.message });
          if (NO_TEMPLATE.test(error.message)) {
            change({ mode: "completion" });
            setNotice("The model has no chat template. This page now sends plain prompts to /v1/completions.");
          }
        } else {
          answer.state = "failed";
          answer.error = error.message;
        }
      } else throw error;
    } finally {
      answer.ended = performance.now();
      running.current = null;
      redraw(undefined);
      input.current?.focus();
    }
  }

  const send = () => {
    if (running.current || !draft.trim()) return;
    const prompt = draft;
    setDraft("");
    void run(prompt, shown, mode).then((sent) => sent || setDraft(prompt));
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const retry = (index: number) => {
    if (!running.current) void run(shown[index]!.prompt, shown.slice(0, index), mode);
  };
  const continued = (exchange: Exchange) => {
    if (!running.current) void run(exchange.prompt + exchange.answer.text, shown, mode);
  };
  const setView = (view: View) => setViews((now) => ({ ...now, [mode]: view }));

  return (
    <div class="chat">
      <section class="conversation" aria-label={mode === "chat" ? "Conversation" : "Completions"}>
        <div class="toolbar">
          <Choice label="Mode" value={mode} options={{ chat: "Chat", completion: "Completion" }} change={(next) => change({ mode: next })} />
          <Choice label="Show answers as" value={views[mode]} options={{ text: mode === "chat" ? "Markdown" : "Text", tokens: "Tokens" }} change={setView} />
          {views[mode] === "tokens" && (
            <span class="scale wide" aria-hidden="true">
              unlikely <i /> likely
            </span>
          )}
          <span class="space" />
          <button class="quiet wide" disabled={!shown.length || !!running.current} onClick={() => setExchanges(exchanges.filter((old) => old.mode !== mode))}>
            Clear
          </button>
          <button class="quiet narrow" aria-expanded={panelOpen} aria-controls="settings" onClick={() => setPanelOpen(!panelOpen)}>
            Settings
          </button>
        </div>
        <div
          class="log"
          ref={log}
          tabIndex={0}
          role="log"
          aria-live="off"
          aria-label="Answers"
          onScroll={({ currentTarget: box }) => (following.current = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END)}
        >
          {!shown.length && <Start mode={mode} model={models[0]?.id} pick={pick} />}
          {shown.map((exchange, index) => (
            <ExchangeView
              key={exchange.id}
              exchange={exchange}
              view={views[mode]}
              retry={() => retry(index)}
              continued={mode === "completion" ? () => continued(exchange) : undefined}
            />
          ))}
        </div>
        {refusal && (
          <p class="refusal" role="alert">
            {refusal.message}
          </p>
        )}
        <div class="composer">
          <label for="draft" class="unseen">
            {mode === "chat" ? "Message" : "Prompt"}
          </label>
          <textarea
            id="draft"
            ref={input}
            rows={1}
            class={mode}
            value={draft}
            placeholder={mode === "chat" ? "Message" : "Prompt: the model continues it"}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={keys}
          />
          {running.current ? (
            <button class="stop" onClick={stop}>
              Stop <kbd>Esc</kbd>
            </button>
          ) : (
            <button class="send" onClick={send} disabled={!draft.trim()}>
              Send <kbd>⏎</kbd>
            </button>
          )}
        </div>
        <p class="unseen" role="status">
          {notice}
        </p>
      </section>
      <SettingsPanel
        open={panelOpen}
        settings={settings}
        change={change}
        models={models}
        refusedParam={refusal?.param ?? null}
        refusal={refusal?.message ?? null}
      />
    </div>
  );
}

interface ChoiceProps<T extends string> {
  label: string;
  value: T;
  options: Record<T, string>;
  change: (value: T) => void;
}

function Choice<T extends string>({ label, value, options, change }: ChoiceProps<T>) {
  return (
    <div class="choice" role="group" aria-label={label}>
      {(Object.entries(options) as [T, string][]).map(([name, text]) => (
        <button key={name} aria-pressed={name === value} onClick={() => change(name)}>
          {text}
        </button>
      ))}
    </div>
  );
}

const EXAMPLES: Record<Mode, string[]> = {
  chat: ["Write a haiku about paging.", "Compare two sorting algorithms in a table."],
  completion: ["def split_path(path):", "class Stack:\n    def __init__(self):\n        self.items = []"],
};
const DEMO = "demo"; // the model that ships with jpaged: it continues Python, and repeats itself without a penalty
const DEMO_NUMBERS = { temperature: "0", repetition_penalty: "1.15", max_tokens: "64" };
const given = (numbers: Record<string, string>) => Object.fromEntries(Object.entries(numbers).filter(([, text]) => text.trim()));
const DEMO_STOP = "\\n\\n\\n";

function Start({ mode, model, pick }: { mode: Mode; model?: string; pick: (text: string) => void }) {
  return (
    <div class="start">
      <h2>{mode === "chat" ? "Talk to" : "Complete a text with"} {model ?? "the model"}</h2>
      <p>
        <kbd>Enter</kbd> sends, <kbd>Shift</kbd> <kbd>Enter</kbd> breaks a line, <kbd>Esc</kbd> stops. Show answers as tokens, and
        point at one to see what else the model could have said.
      </p>
      {EXAMPLES[model === DEMO ? "completion" : mode].map((text) => (
        <button key={text} onClick={() => pick(text)}>
          {text.split("\n")[0] || text}
        </button>
      ))}
    </div>
  );
}
