import { useEffect, useState } from "preact/hooks";
import { ApiError, get, type ModelCard } from "./api";
import { ChatView } from "./chat/chat";
import { EngineView } from "./engine/engine";
import { count } from "./format";
import { useTheme } from "./theme";

const TABS = [
  ["chat", "Chat"],
  ["engine", "Engine"],
] as const;
type Tab = (typeof TABS)[number][0];

const tabOfAddress = (): Tab => (location.hash === "#engine" ? "engine" : "chat");

/** The whole page. Keys live in this component's state and nowhere else. */
export function App() {
  const [tab, setTab] = useState<Tab>(tabOfAddress());
  const [theme, toggleTheme] = useTheme();
  const [apiKey, setApiKey] = useState("");
  const [adminKey, setAdminKey] = useState("");
  const [keysOpen, setKeysOpen] = useState(false);
  const [models, setModels] = useState<ModelCard[]>([]);
  const [problem, setProblem] = useState<string | null>(null);

  useEffect(() => {
    const follow = () => setTab(tabOfAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  useEffect(() => {
    const leaving = new AbortController();
    get<{ data: ModelCard[] }>("v1/models", apiKey, leaving.signal).then(
      (list) => {
        setModels(list.data);
        setProblem(null);
      },
      (error) => {
        if (leaving.signal.aborted) return;
        const refused = error instanceof ApiError && error.status === 401;
        if (refused) setKeysOpen(true);
        setProblem(refused ? (apiKey ? "key refused" : "needs an API key") : "not reachable");
      },
    );
    return () => leaving.abort();
  }, [apiKey]);

  const select = (next: Tab) => {
    location.hash = next === "chat" ? "" : next;
    setTab(next);
  };
  const arrows = (event: KeyboardEvent) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = tab === "chat" ? "engine" : "chat";
    select(next);
    document.getElementById(`tab-${next}`)?.focus();
  };

  const model = models[0];
  return (
    <>
      <header class="bar">
        <h1>
          <Mark /> jpaged
        </h1>
        <div role="tablist" aria-label="Views" class="tabs" onKeyDown={arrows}>
          {TABS.map(([name, label]) => (
            <button
              key={name}
              id={`tab-${name}`}
              role="tab"
              aria-selected={tab === name}
              aria-controls={`view-${name}`}
              tabIndex={tab === name ? 0 : -1}
              onClick={() => select(name)}
            >
              {label}
            </button>
          ))}
        </div>
        <p class="served" aria-live="polite">
          <span class={problem ? "dot bad" : model ? "dot good" : "dot"} />
          {problem ?? (model ? <><b>{model.id}</b> <span class="wide">{count(model.max_model_len)} tokens</span></> : "connecting")}
        </p>
        <button class="quiet" aria-expanded={keysOpen} aria-controls="keys" onClick={() => setKeysOpen(!keysOpen)}>
          Keys{apiKey || adminKey ? " ●" : ""}
        </button>
        <button class="quiet" onClick={toggleTheme} aria-label={`Switch to ${theme === "dark" ? "light" : "dark"} colours`}>
          {theme === "dark" ? "☀" : "☾"}
        </button>
      </header>
      {/* A form, so that Enter applies a key. It is never sent: the policy of the page forbids form actions. */}
      <form id="keys" class="keys" hidden={!keysOpen} onSubmit={(event) => { event.preventDefault(); setKeysOpen(false); }}>
        <Key id="api-key" label="API key" change={setApiKey} />
        <Key id="admin-key" label="Admin key" change={setAdminKey} />
        <button type="submit">Done</button>
        <p>Kept in this page's memory until you reload it. Sent to this server only.</p>
      </form>
      <main>
        <div id="view-chat" role="tabpanel" aria-labelledby="tab-chat" hidden={tab !== "chat"}>
          <ChatView models={models} apiKey={apiKey} openKeys={() => setKeysOpen(true)} />
        </div>
        <div id="view-engine" role="tabpanel" aria-labelledby="tab-engine" hidden={tab !== "engine"}>
          <EngineView shown={tab === "engine"} adminKey={adminKey} theme={theme} openKeys={() => setKeysOpen(true)} />
        </div>
      </main>
    </>
  );
}

function Key(props: { id: string; label: string; change: (key: string) => void }) {
  // The key is applied when the field is left, so that half a key is never sent. The field keeps its own text.
  return (
    <label for={props.id}>
      {props.label}
      <input
        id={props.id}
        type="password"
        autocomplete="off"
        spellcheck={false}
        onChange={(event) => props.change(event.currentTarget.value.trim())}
      />
    </label>
  );
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 13 13" aria-hidden="true">
      <rect width="6" height="6" fill="var(--mark-1)" />
      <rect x="7" width="6" height="6" fill="var(--mark-2)" />
      <rect y="7" width="6" height="6" fill="var(--mark-3)" />
      <rect x="7" y="7" width="6" height="6" fill="var(--line)" />
    </svg>
  );
}
