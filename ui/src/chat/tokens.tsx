// The tokens of an answer, coloured by probability, with a table of alternatives for the one under the pointer.

import { Component } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { probability } from "../format";
import { shownTexts, type Token } from "./answer";

const PIECE = 64; // tokens that are rendered as one unit: a new token renders its piece only

/** A token's text with its blanks and line breaks visible. */
const visible = (text: string) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

interface PieceProps {
  texts: string[];
  tokens: Token[];
  offset: number;
}

class Piece extends Component<PieceProps> {
  shouldComponentUpdate({ texts, tokens }: PieceProps) {
    return tokens.length !== this.props.tokens.length || texts.at(-1) !== this.props.texts.at(-1);
  }

  render({ texts, tokens, offset }: PieceProps) {
    return tokens.map((token, i) => (
      <span key={i} class="token" data-token={offset + i} style={{ "--p": Math.exp(token.logprob).toFixed(3) }}>
        {texts[i]}
      </span>
    ));
  }
}

/** Hover, tap, or move with the arrow keys. */
export function Tokens({ tokens }: { tokens: Token[] }) {
  const box = useRef<HTMLDivElement>(null);
  const [selected, setSelected] = useState<number | null>(null);
  const texts = shownTexts(tokens);
  const pieces = [];
  for (let offset = 0; offset < tokens.length; offset += PIECE) {
    const end = offset + PIECE;
    pieces.push(<Piece key={offset} texts={texts.slice(offset, end)} tokens={tokens.slice(offset, end)} offset={offset} />);
  }
  const pick = (event: Event) => {
    const index = (event.target as HTMLElement).dataset?.token;
    if (index !== undefined) setSelected(Number(index));
  };
  const move = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    setSelected(Math.min(Math.max((selected ?? -step) + step, 0), tokens.length - 1));
  };
  const anchor = selected === null ? null : box.current?.querySelector<HTMLElement>(`[data-token="${selected}"]`);
  const token = selected === null ? undefined : tokens[selected];
  return (
    <div
      class="tokens"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label="Tokens of the answer. Left and right arrow keys show the alternatives of each."
      onMouseOver={pick}
      onClick={pick}
      onMouseLeave={() => setSelected(null)}
      onBlur={() => setSelected(null)}
      onKeyDown={move}
    >
      {pieces}
      {token && anchor && <Alternatives token={token} index={selected!} anchor={anchor} />}
    </div>
  );
}

function Alternatives({ token, index, anchor }: { token: Token; index: number; anchor: HTMLElement }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const own = box.current!.getBoundingClientRect();
    const below = at.bottom + own.height + 10 < innerHeight;
    box.current!.style.left = `${Math.max(8, Math.min(at.left - 8, innerWidth - own.width - 8))}px`;
    box.current!.style.top = `${below ? at.bottom + 6 : at.top - own.height - 6}px`;
    anchor.classList.add("selected");
    return () => anchor.classList.remove("selected");
  }, [token, anchor]);
  const listed = token.top.some((other) => other.text === token.text) ? token.top : [...token.top, token];
  const rest = 1 - listed.reduce((sum, other) => sum + Math.exp(other.logprob), 0);
  return (
    <div class="alternatives" ref={box} role="status">
      <p>
        <b>{visible(token.text)}</b> {probability(Math.exp(token.logprob))}
        <span> token {index + 1}, logprob {token.logprob.toFixed(3)}</span>
      </p>
      <table>
        <tbody>
          {listed.map((other, i) => (
            <tr key={i} class={other.text === token.text ? "chosen" : ""}>
              <th scope="row">{visible(other.text)}</th>
              <td class="meter">
                <i style={{ width: `${Math.exp(other.logprob) * 100}%` }} />
              </td>
              <td>{probability(Math.exp(other.logprob))}</td>
            </tr>
          ))}
          <tr class="rest">
            <th scope="row">all others</th>
            <td class="meter">
              <i style={{ width: `${Math.max(rest, 0) * 100}%` }} />
            </td>
            <td>{probability(Math.max(rest, 0))}</td>
          </tr>
        </tbody>
      </table>
    </div>
  );
}
