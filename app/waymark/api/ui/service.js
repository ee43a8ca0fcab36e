// Requests to the service, with the token that it may ask for, and what to say of how they went.

let token = sessionStorage.getItem("token") || "";
let asking = null;
let tell = () => {};

export function onState(callback) {
  tell = callback;
}

export function get(path) {
  return request(path, {});
}

export function post(path, body) {
  return request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

// The JSON of an answer. Throws an Error with the sentence of the service.
async function request(path, options) {
  const answer = await send(path, options);
  const content = await answer.json();
  if (answer.ok) return content;
  throw new Error(content.error || `${path} was answered with ${answer.status}`);
}

// The answer, once there is a token that it accepts. Throws where none comes, or where Redis is unavailable.
export async function send(path, options) {
  for (;;) {
    let answer;
    const sent = token;
    try {
      const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
      answer = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      tell("Waymark does not answer; trying again", true);
      throw new Error("Waymark does not answer");
    }
    if (answer.status === 401) {
      await login(sent);
      continue;
    }
    if (answer.status === 503) tell("Redis is unavailable; trying again", true);
    else if (answer.ok) tell("live", false);
    return answer;
  }
}

// Ask for a token, once for all requests that need it.
function login(refused) {
  if (token !== refused) return Promise.resolve(); // another request has got one meanwhile
  asking ||= new Promise((resolve) => {
    const dialog = document.getElementById("login");
    const field = document.getElementById("token");
    document.getElementById("login-error").textContent = refused ? "This token was refused." : "";
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      token = field.value.trim();
      sessionStorage.setItem("token", token);
      field.value = "";
      asking = null;
      resolve();
    };
    tell("a token is needed", true);
    dialog.showModal();
  });
  return asking;
}
