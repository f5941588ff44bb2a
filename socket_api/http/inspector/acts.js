// Acts on a session: each first says what it will do.

import { html, useEffect, useRef, useState } from "./preact.js";
import { ask, isOwner } from "./asking.js";
import { Panel } from "./parts.js";
import { bytes, count, hrefOf, nameOf, plain, plural, routeOf, sum, typed } from "./words.js";

// Each: { name, as of its command; is: whether it can be done; says; verb, body and of: the request; field: what has to be
// given; most: of tokens, where a place may be given; plan: whether its plan is shown first; done: what to tell of the
// answer, null where the session is gone then }
function actsOf({ info, versions }, point) {
  const awake = info.state === "awake";
  const stored = info.version !== null;
  const { version, pinned, stripped } = versions.at(-1) ?? {};
  const { reference, tokens, most } = point ?? { reference: info.session, most: info.token_count };
  const free = (told) => `Done; ${bytes(told.bytes_freed)} are free.`;
  return [
    { name: "Sleep", is: awake, says: `Its ${plural(info.token_count, "token")} go to disk, and ${bytes(info.resident_bytes)} of memory are freed. The next use wakes it.`, done: (told) => `Asleep as @${told.version}.` },
    { name: "Save", is: awake && (info.dirty || !stored), says: "Its present state is written as a version. It stays awake.", done: (told) => `Saved as @${told.version}.` },
    { name: "Wake", is: !awake, says: `It comes back into memory, and is checked to be what slept. ${info.unread_tokens ? `Of its last ${plural(info.unread_tokens, "token")} only the text was kept: the model reads them again.` : stripped ? "What went is read again." : "No token is read again."}`, done: (told) => `It is awake with ${plural(told.token_count, "token")}.` },
    { name: "Fork", is: stored || awake, of: reference, field: "name", most, at: tokens,
      says: `A new session begins asleep, with the first tokens of ${nameOf(reference)}. Both share them on disk. Its first use wakes it.`,
      done: (told) => html`Made <a href=${hrefOf(told.session)}>${nameOf(told.session)}</a> with ${plural(told.token_count, "token")}.` },
    { name: "Tag", is: stored, field: "tag", verb: "mark", says: `@${version} gets a tag: another name for it. A version with a tag is never pruned.`, done: () => "Tagged." },
    { name: pinned ? "Unpin" : "Pin", is: stored, verb: "mark", body: { pinned: !pinned }, says: pinned ? `A prune may remove @${version} again.` : `No prune removes @${version}.`, done: () => "Done." },
    { name: "Strip", is: stored && !awake && isOwner(), verb: "maintain", body: { operation: "strip" }, plan: true, says: "What the model computed for its tokens goes, but for what other sessions need; the tokens stay. The next use reads again what went.", done: free },
    { name: "Forget", is: isOwner(), verb: "maintain", body: { operation: "forget" }, plan: true, says: "Every version of it goes for good, from memory and from disk. What other sessions share with it stays.", done: null },
  ].filter((act) => act.is).map((act) => ({ of: info.session, verb: act.name.toLowerCase(), body: {}, ...act }));
}

export function Acts({ detail, point, chosen, onChoose, onDone }) {
  const [told, setTold] = useState(null);
  const [given, setGiven] = useState({});
  const acts = actsOf(detail, point);
  const act = acts.find((one) => one.name === chosen);
  const done = (sentence) => {
    setTold(sentence);
    onChoose(null);
    onDone();
  };
  const at = act?.most && (given.at ?? act.at);
  return html`<${Panel} wide title="Acts" command=${act && `torpor ${act.name.toLowerCase()} ${typed(act.of)}${act.field ? ` ${given[act.field] ? typed(given[act.field]) : act.field.toUpperCase()}` : ""}${at ? ` --at ${at}` : ""}`}>
    <div class="tools">${acts.map((one) => html`<button aria-expanded=${one === act ? "true" : "false"} class=${one.plan ? "takes" : ""} onClick=${() => (setTold(null), setGiven({}), onChoose(one === act ? null : one.name))}>${one.name} …</button>`)}</div>
    ${act && html`<${Consent} key=${`${act.name} ${act.of} ${act.at}`} act=${act} given=${given[act.field] ?? ""} at=${at ?? ""} onGive=${(more) => setGiven({ ...given, ...more })} onDone=${done} onLeave=${() => onChoose(null)} />`}
    <p class="small" role="status">${told}</p>
  <//>`;
}

function Consent({ act, given, at, onGive, onDone, onLeave }) {
  const [plan, setPlan] = useState(null);
  const [problem, setProblem] = useState("");
  const [works, setWorks] = useState(false);
  const form = useRef(null);
  const path = routeOf(act.of, `/${act.verb}`);
  const fail = (error) => setProblem(error.message);
  useEffect(() => {
    form.current.querySelector("input, button:not(:disabled)").focus();
    form.current.scrollIntoView({ block: "nearest" });
    onGive({ at: undefined });
    if (act.plan) ask(path, { body: { ...act.body, dry_run: true } }).then(setPlan, fail);
  }, []);
  const carryOut = async (event) => {
    event.preventDefault();
    setProblem("");
    setWorks(true);
    try {
      const answer = await ask(path, { body: { ...act.body, ...(act.field && { [act.field]: given }), ...(at && { at_token: Number(at) }) } });
      if (act.done) onDone(act.done(answer));
      else location.hash = "#/";
    } catch (error) {
      fail(error);
    }
    setWorks(false);
  };
  const waits = works || (act.plan && !plan?.actions.length) || (act.field && !given);
  return html`<form class="consent" ref=${form} onSubmit=${carryOut} onKeyDown=${(event) => event.key === "Escape" && onLeave()}>
    <p>${act.says}</p>
    ${act.plan && (plan ? html`<${Plan} plan=${plan} />` : !problem && html`<p class="small">working out the plan …</p>`)}
    <div class="tools">${act.field && html`<label>${act.field} <input name=${act.field} autocomplete="off" value=${given} onInput=${(event) => onGive({ [act.field]: event.currentTarget.value })} /></label>`}
      ${act.most && html`<label>at token <input name="at" type="number" min="1" max=${act.most} placeholder=${act.most} value=${at} onInput=${(event) => onGive({ at: event.currentTarget.value })} /> of ${count(act.most)}</label>`}</div>
    ${problem && html`<p class="failure" role="alert">${problem}</p>`}
    <div class="tools"><button class="go" disabled=${waits}>${works ? "at work …" : act.name}</button> <button type="button" onClick=${onLeave}>Leave it</button></div>
  </form>`;
}

const SHOWN = 6;
const FREEING = ["remove", "rewrite", "strip"];

function Plan({ plan }) {
  if (!plan.actions.length) return html`<p>There is nothing to do.</p>`;
  const size = sum(plan.actions.filter((step) => FREEING.includes(step.kind)), (step) => step.size_bytes);
  return html`<p>${plural(plan.actions.length + plan.actions_left_out, "step")}; about ${bytes(size)} of the disk would be free:</p>
    <ul class="small">${plan.actions.slice(0, SHOWN).map((step) => html`<li>${plain(step.kind)}${step.session ? ` ${nameOf(step.session)}` : ""}${step.version === null ? "" : `@${step.version}`}: ${plain(step.reason)}</li>`)}
      ${plan.actions.length > SHOWN && html`<li>and ${plural(plan.actions.length - SHOWN + plan.actions_left_out, "further step")}</li>`}</ul>`;
}
