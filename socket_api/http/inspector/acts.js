// What can be done with a session. Each act first says what it will do; what takes something away shows its plan.

import { html, useEffect, useRef, useState } from "./preact.js";
import { ask, isOwner } from "./asking.js";
import { Panel } from "./parts.js";
import { bytes, count, hrefOf, nameOf, plain, plural, routeOf, typed } from "./words.js";

// Each: { name, is: whether it can be done, says, path, body, field: what has to be given, plan: whether a plan is
// shown first, done: what to tell of the answer, leave: whether the session is gone then }
function actsOf({ info, versions }, point) {
  const awake = info.state === "awake";
  const stored = info.version !== null;
  const newest = versions.at(-1);
  const pinned = newest?.pinned;
  const whole = { session: info.session };
  const at = point ?? { reference: info.session, tokens: null };
  return [
    { name: "Sleep", is: awake, ...whole, says: `Its ${plural(info.token_count, "token")} go to disk, and ${bytes(info.resident_bytes)} of memory are freed. The next use wakes it.`, path: "/sleep", body: {}, command: "sleep",
      done: (told) => `It sleeps as @${told.version}.` },
    { name: "Save", is: awake && (info.dirty || !stored), ...whole, says: "Its state goes to disk as a version, and it stays awake.", path: "/save", body: {}, command: "save", done: (told) => `Saved as @${told.version}.` },
    { name: "Wake", is: !awake, ...whole, says: `Its state comes back from disk into memory, proven to be the one that slept. No token is read again${info.unread_tokens ? `, but ${count(info.unread_tokens)} that have no state` : ""}.`, path: "/wake", body: {}, command: "wake",
      done: (told) => `It is awake with ${plural(told.token_count, "token")}.` },
    { name: "Fork", is: stored || awake, session: at.reference, field: "name", label: "name of the new session", command: "fork", path: "/fork", body: at.tokens ? { at_token: at.tokens } : {},
      says: `A new session begins as this one ${at.tokens ? `was at token ${count(at.tokens)} of ${nameOf(at.reference)}` : "stands"}. It sleeps, and shares all blocks with it: it takes next to no room.`,
      done: (told) => html`Made <a href=${hrefOf(told.session)}>${nameOf(told.session)}</a> with ${plural(told.token_count, "token")}.` },
    { name: "Tag", is: stored, ...whole, field: "tag", label: "tag", says: `Its newest version, @${newest?.version}, gets a name. It is never pruned while it has one.`, path: "/mark", body: {}, command: "tag", done: () => "Tagged." },
    { name: pinned ? "Unpin" : "Pin", is: stored, ...whole, says: pinned ? `The pin comes off @${newest?.version}. The version stays until a prune finds it.` : `Its newest version, @${newest?.version}, is never pruned.`, path: "/mark", body: { pinned: !pinned }, command: pinned ? "unpin" : "pin",
      done: (told) => (told.pinned ? "Pinned." : "The pin is off.") },
    { name: "Strip", is: stored && !awake && isOwner(), ...whole, plan: true, says: "Its keys and values go, and its tokens and text stay. The next use reads the tokens again.", path: "/maintain", body: { operation: "strip" }, command: "strip",
      done: (told) => `Stripped; ${bytes(told.bytes_freed)} are free.` },
    { name: "Forget", is: isOwner(), ...whole, plan: true, leave: true, says: "Every version of it goes for good, from memory and from disk. What others share stays.", path: "/maintain", body: { operation: "forget" }, command: "forget",
      done: (told) => `Forgotten; ${bytes(told.bytes_freed)} are free.` },
  ].filter((act) => act.is);
}

export function Acts({ detail, point, chosen, onChoose, onDone }) {
  const [told, setTold] = useState(null);
  const acts = actsOf(detail, point);
  const act = acts.find((one) => one.name === chosen);
  const done = (sentence) => {
    setTold(sentence);
    onChoose(null);
    onDone();
  };
  return html`<${Panel} wide title="Acts" command=${act ? `torpor ${act.command} ${typed(act.session)}${act.field ? ` ${act.field.toUpperCase()}` : ""}${act.body.at_token ? ` --at ${act.body.at_token}` : ""}` : ""}>
    <div class="tools">${acts.map((one) => html`<button aria-expanded=${one === act ? "true" : "false"} class=${one.plan ? "takes" : ""} onClick=${() => (setTold(null), onChoose(one === act ? null : one.name))}>${one.name} …</button>`)}</div>
    ${act && html`<${Consent} key=${`${act.name} ${act.session} ${act.body.at_token}`} act=${act} onDone=${done} onLeave=${() => onChoose(null)} />`}
    <p class="small" role="status">${told}</p>
  <//>`;
}

function Consent({ act, onDone, onLeave }) {
  const [given, setGiven] = useState("");
  const [plan, setPlan] = useState(null);
  const [problem, setProblem] = useState("");
  const [works, setWorks] = useState(false);
  const form = useRef(null);
  const path = routeOf(act.session, act.path);
  const attempt = async (what) => {
    try {
      return await what();
    } catch (error) {
      setProblem(error.message);
      return null;
    }
  };
  useEffect(() => {
    form.current.querySelector("input, button:not(:disabled)").focus();
    form.current.scrollIntoView({ block: "nearest" });
    if (act.plan) attempt(async () => setPlan(await ask(path, { body: { ...act.body, dry_run: true } })));
  }, []);
  const carryOut = async (event) => {
    event.preventDefault();
    setProblem("");
    setWorks(true);
    const answer = await attempt(() => ask(path, { body: { ...act.body, ...(act.field ? { [act.field]: given } : {}) } }));
    setWorks(false);
    if (answer === null) return;
    if (act.leave) location.hash = "#/";
    else onDone(act.done(answer));
  };
  const waits = works || (act.plan && plan === null) || (act.field && !given);
  return html`<form class="consent" ref=${form} onSubmit=${carryOut} onKeyDown=${(event) => event.key === "Escape" && onLeave()}>
    <p>${act.says}</p>
    ${act.plan && (plan ? html`<${Plan} plan=${plan} />` : !problem && html`<p class="small">working out the plan …</p>`)}
    ${act.field && html`<label>${act.label} <input name=${act.field} autocomplete="off" value=${given} onInput=${(event) => setGiven(event.currentTarget.value)} /></label>`}
    ${problem && html`<p class="failure" role="alert">${problem}</p>`}
    <div class="tools"><button class="go" disabled=${waits}>${works ? "at work …" : act.name}</button> <button type="button" onClick=${onLeave}>Leave it</button></div>
  </form>`;
}

const SHOWN = 6;
const FREEING = ["remove", "rewrite", "strip"];

function Plan({ plan }) {
  const size = plan.actions.filter((step) => FREEING.includes(step.kind)).reduce((sum, step) => sum + step.size_bytes, 0);
  return html`<p>${plural(plan.actions.length + plan.actions_left_out, "step")}; about ${bytes(size)} of the disk would be free:</p>
    <ul class="small">${plan.actions.slice(0, SHOWN).map((step) => html`<li>${plain(step.kind)}${step.version === null ? "" : ` @${step.version}`}: ${plain(step.reason)}</li>`)}
      ${plan.actions.length > SHOWN && html`<li>and ${plural(plan.actions.length - SHOWN + plan.actions_left_out, "further step")}</li>`}</ul>`;
}
