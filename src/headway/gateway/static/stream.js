// Server-sent events by fetch instead of EventSource, because only fetch can send the admin key.

let key = sessionStorage.getItem("headway-key");

export function setKey(value) {
  key = value;
  sessionStorage.setItem("headway-key", value);
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

export class KeyWanted extends Error {}

export async function getJson(path) {
  const answer = await fetch(path, { headers: headers() });
  if (answer.status === 401 || answer.status === 403) throw new KeyWanted();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : `answered ${answer.status}`);
  return body;
}

// Calls on[name](value) for each event until the stream ends; throws when it cannot be opened.
export async function follow(path, on, opened) {
  const answer = await fetch(path, { headers: { ...headers(), accept: "text/event-stream" } });
  if (answer.status === 401 || answer.status === 403) throw new KeyWanted();
  if (!answer.ok) throw new Error(`answered ${answer.status}`);
  opened();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const name = /^event: (.*)$/m.exec(event);
      const data = /^data: (.*)$/m.exec(event);
      if (name && data && on[name[1]]) on[name[1]](JSON.parse(data[1]));
    }
  }
}
