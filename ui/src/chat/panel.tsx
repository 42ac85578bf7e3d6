// The settings of a request. An error of the server is shown at the field that it names.

import type { ComponentChildren } from "preact";
import type { ModelCard } from "../api";
import { completionTokens, NUMBER_FIELDS, STRUCTURES, type NumberField, type Settings, type StructureKind } from "./settings";

interface Props {
  open: boolean; // on a narrow screen
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  models: ModelCard[];
  refusedParam: string | null;
  refusal: string | null;
}

export function SettingsPanel({ open, settings, change, models, refusedParam, refusal }: Props) {
  /** The refusal, if it is about one of these parameters or a part of one. */
  const errorOf = (...params: string[]) =>
    params.some((param) => refusedParam === param || refusedParam?.startsWith(`${param}.`)) ? refusal : null;
  const { mode, structure } = settings;
  const setStructure = (text: string) => change({ structures: { ...settings.structures, [structure]: text } });
  const structureError = errorOf("response_format", "structured_outputs");
  const hasEditor = structure !== "none" && structure !== "json_object";
  return (
    <aside id="settings" class={open ? "panel open" : "panel"} aria-label="Settings of the next request">
      {models.length > 1 && (
        <Field id="model" label="Model">
          <select id="model" value={settings.model || models[0]!.id} onChange={(event) => change({ model: event.currentTarget.value })}>
            {models.map(({ id }) => <option key={id}>{id}</option>)}
          </select>
        </Field>
      )}
      {mode === "chat" && (
        <Field id="system" label="System prompt">
          <textarea id="system" rows={2} value={settings.system} onInput={(event) => change({ system: event.currentTarget.value })} />
        </Field>
      )}
      <fieldset>
        <legend>Sampling</legend>
        <div class="numbers">
          {NUMBER_FIELDS.map((field) => (
            <NumberInput
              key={field.name}
              field={field}
              value={settings.numbers[field.name] ?? ""}
              placeholder={field.name === "max_tokens" && mode === "completion" ? String(completionTokens(models[0]?.max_model_len ?? 512)) : "default"}
              error={errorOf(field.name, ...(field.name === "max_tokens" ? ["max_completion_tokens"] : []))}
              change={(text) => change({ numbers: { ...settings.numbers, [field.name]: text } })}
            />
          ))}
        </div>
        <Field id="stop" label="Stop strings, one a line" error={errorOf("stop")}>
          <textarea id="stop" class="code" rows={1} placeholder="\n stands for a line break" value={settings.stop} onInput={(event) => change({ stop: event.currentTarget.value })} />
        </Field>
        <label class="check" title="logprobs, with the five most likely tokens">
          <input type="checkbox" checked={settings.probabilities} onChange={(event) => change({ probabilities: event.currentTarget.checked })} />
          Token probabilities
        </label>
      </fieldset>
      <fieldset>
        <legend>Structured output</legend>
        <Field id="structure" label="The answer is">
          <select id="structure" value={structure} onChange={(event) => change({ structure: event.currentTarget.value as StructureKind })}>
            {Object.entries(STRUCTURES).map(([kind, { label }]) => <option key={kind} value={kind}>{label}</option>)}
          </select>
        </Field>
        {hasEditor && (
          <Field id="structure-text" label={STRUCTURES[structure].hint} error={structureError}>
            <textarea
              id="structure-text"
              class="code"
              rows={structure === "json_schema" ? 12 : 4}
              spellcheck={false}
              aria-invalid={!!structureError}
              aria-describedby={structureError ? "structure-text-error" : undefined}
              value={settings.structures[structure]}
              onInput={(event) => setStructure(event.currentTarget.value)}
            />
          </Field>
        )}
      </fieldset>
      {mode === "chat" && (
        <fieldset>
          <legend>Tools</legend>
          <Field id="tools" label="Definitions, a JSON list" error={errorOf("tools")}>
            <textarea id="tools" class="code" rows={settings.tools ? 8 : 1} spellcheck={false} placeholder='[{"type": "function", …}]' value={settings.tools} onInput={(event) => change({ tools: event.currentTarget.value })} />
          </Field>
          {settings.tools.trim() && (
            <Field id="tool-choice" label="tool_choice" error={errorOf("tool_choice")}>
              <select id="tool-choice" value={settings.toolChoice} onChange={(event) => change({ toolChoice: event.currentTarget.value })}>
                <option>auto</option>
                <option>required</option>
                <option>none</option>
              </select>
            </Field>
          )}
        </fieldset>
      )}
    </aside>
  );
}

interface FieldProps {
  id: string;
  label: string;
  error?: string | null;
  children: ComponentChildren;
}

function Field({ id, label, error, children }: FieldProps) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children}
      {error && <p class="field-error" id={`${id}-error`}>{error}</p>}
    </div>
  );
}

interface NumberInputProps {
  field: NumberField;
  value: string;
  placeholder: string;
  error: string | null;
  change: (text: string) => void;
}

function NumberInput({ field, value, placeholder, error, change }: NumberInputProps) {
  const { name, label, min, max, step, help } = field;
  const title = `${name}: ${help}`;
  return (
    <div class="field number">
      <label for={name} title={title}>{label}</label>
      <input
        id={name}
        type="number"
        {...{ min, max, step, value, placeholder, title }}
        aria-invalid={!!error}
        aria-describedby={error ? `${name}-error` : undefined}
        onInput={(event) => change(event.currentTarget.value)}
      />
      {error && <p class="field-error" id={`${name}-error`}>{error}</p>}
    </div>
  );
}
