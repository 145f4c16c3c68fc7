// The official OpenAI client for Node, unmodified, put through its paces; prints one JSON object of what it saw.
// Arguments: the gateway's base URL, and the name of a case.

import OpenAI from "openai";

const [baseURL, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "sk-any" });
const messages = [{ role: "user", content: "hello" }];

const cases = {
  async chat() {
    const answer = await client.chat.completions.create({ model: "auto", messages });
    return { text: answer.choices[0].message.content, tokens: answer.usage.completion_tokens };
  },
  async stream() {
    const stream = await client.chat.completions.create({ model: "auto", messages, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text, tokens: usage.completion_tokens };
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "look_up", parameters: { type: "object", properties: {} } } }];
    const stream = client.chat.completions.stream({ model: "auto", messages, tools });
    const whole = await stream.finalChatCompletion();
    const call = whole.choices[0].message.tool_calls[0];
    return { called: call.function.name, arguments: call.function.arguments, finish: whole.choices[0].finish_reason };
  },
  async target() {
    const { response } = await client.chat.completions.create({ model: "auto", messages }, { headers: { "x-slo-ttft-ms": "5000" } }).withResponse();
    return { instance: response.headers.get("x-headway-instance"), slo: response.headers.get("x-headway-slo") };
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return { names };
  },
  async error() {
    try {
      await client.chat.completions.create({ model: "no-such-model", messages });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, code: error.code };
    }
  },
  async failing() {
    try {
      await client.chat.completions.create({ model: "auto", messages });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status };
    }
  },
  async cancel() {
    const stream = await client.chat.completions.create({ model: "auto", messages, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content) break; // leaving the loop aborts the request
    }
    return { left: true };
  },
};

console.log(JSON.stringify(await cases[name]()));
