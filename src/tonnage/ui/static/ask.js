// Questions to the server. Of several of one kind only the latest is answered; what fails is one sentence.

const running = new Map();
const LONGEST_MS = 60_000;

/** The question was replaced by a newer one of its kind: nobody waits for its answer. */
export class Replaced extends Error {}

/** The server did not answer, or refused; the message is a sentence for people. */
export class Failed extends Error {}

/**
 * Post JSON and return the response.
 * @param {string} kind a newer question of a kind replaces an older one
 * @param {string} path
 * @param {object} body
 * @returns {Promise<Response>}
 */
export async function ask(kind, path, body) {
  running.get(kind)?.abort(new Replaced());
  const control = new AbortController();
  running.set(kind, control);
  const late = setTimeout(() => control.abort(new Failed("The server took too long to answer.")), LONGEST_MS);
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: control.signal,
    });
    if (!response.ok) throw new Failed(await refusal(response));
    const text = await response.text();
    if (running.get(kind) !== control) throw new Replaced();
    return text;
  } catch (error) {
    if (error instanceof Replaced || error instanceof Failed) throw error;
    if (control.signal.reason instanceof Error && control.signal.aborted) throw control.signal.reason;
    throw new Failed("The server does not answer. Is tonnage ui still running?");
  } finally {
    clearTimeout(late);
    if (running.get(kind) === control) running.delete(kind);
  }
}

/** Return the sentences of a refusal of the interface. */
async function refusal(response) {
  try {
    const { problems } = await response.json();
    return problems.map(sentence).join(" ");
  } catch {
    return `The server refused (${response.status}).`;
  }
}

function sentence(problem) {
  const expected = problem.expected ? `; expected ${problem.expected}` : "";
  const found = problem.found ? `; found ${problem.found}` : "";
  return `${problem.where}: ${problem.what}${expected}${found}.`;
}
