// An agent of the AI SDK that answers the questions of standard input, one a line.
// `node --input-type=module --eval "$(cat ai_sdk_agent.mjs)" URL TOKEN`, in the folder that has the packages.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, jsonSchema, streamText, tool } from "ai";
import { createInterface } from "node:readline";

const [url, apiKey] = process.argv.slice(1);
const provider = createOpenAICompatible({ name: "torpor", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const look = tool({
  description: "Looks at a part of the file.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { part: { type: "string", enum: ["head", "body", "tail"] } },
    required: ["part"],
    additionalProperties: false,
  }),
  execute: async ({ part }) => `The ${part} has 12 lines.`,
});

const messages = [];
for await (const question of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content: question });
  const answer = streamText({
    model: provider("demo"),
    instructions: "You are terse.",
    messages,
    tools: { look },
    stopWhen: isStepCount(4),
    maxRetries: 0,
    onError: ({ error }) => {
      throw error;
    },
  });
  const text = await answer.text;
  messages.push(...(await answer.responseMessages));
  console.log(JSON.stringify(text));
}
