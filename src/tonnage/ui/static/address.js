// The state of the page is its address: settings in the query, a pasted config.json packed into the fragment.

/** Return the query of a form: what differs from its defaults, and plan A if one is pinned. */
export function queryOf(form, defaults, pinned) {
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    const text = String(value).trim();
    if (name in defaults && text !== defaults[name]) query.set(name, text);
  }
  if (pinned !== null) query.set("a", pinned);
  return query.toString();
}

/** Put the settings of a query into a form; what it does not say has its default. */
export function fill(form, defaults, query) {
  const said = new URLSearchParams(query);
  for (const [name, usual] of Object.entries(defaults)) {
    const value = said.get(name) ?? usual;
    const control = form.elements.namedItem(name);
    if (control instanceof RadioNodeList) control.value = value;
    else if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = value === "on";
    else if (control instanceof HTMLSelectElement) choose(control, value);
    else if (control) control.value = value;
  }
}

function choose(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.add(new Option(`${value} (not known here)`, value));
  select.value = value;
}

/** Return the fragment that holds configs by name: deflated, in letters that an address may have. */
export async function packed(configs) {
  const held = Object.entries(configs).filter(([, text]) => text);
  if (held.length === 0) return "";
  const parts = await Promise.all(held.map(async ([name, text]) => `${name}=${await deflate(text)}`));
  return `#${parts.join("&")}`;
}

/** Return the configs a fragment holds. */
export async function unpacked(fragment) {
  const configs = {};
  for (const part of fragment.replace(/^#/, "").split("&")) {
    const [name, value] = part.split("=", 2);
    if (value && (name === "config" || name === "a-config")) configs[name] = await inflate(value);
  }
  return configs;
}

async function deflate(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let letters = "";
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

const MOST_CHARACTERS = 1 << 20;

async function inflate(value) {
  const letters = atob(value.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let text = "";
  for (;;) {
    const { done, value: chunk } = await reader.read();
    text += decoder.decode(chunk, { stream: !done });
    if (text.length > MOST_CHARACTERS) throw new RangeError("a config of more than a mebibyte");
    if (done) return text;
  }
}
