// Serves a GGUF target in llama.cpp, alone or with a draft: `node serve.mjs SETTINGS`, one request a line in, one
// answer a line out.
//
// SETTINGS (JSON): modules, the folder node_modules; target and draft, GGUF files, draft null for none; k, drafts a
// round; context, the most tokens of a text; threads, of each model, 1 if not given. A request: {"prompts": lists of ids, "max_new_tokens", "temperature",
// "seed"}; its answer: {"tokens": lists of ids, "seconds", "rounds", "accepted", "by_depth"}. Every pass of the target is
// a round, the one over the prompt too. by_depth: rounds that accepted drafts 0 to d; those of a last round count beyond
// the end of the text too.
//
// Rounds are those of llama.cpp's server, on the same calls: the draft's likeliest tokens, one pass of the target with a
// sample at each of them, and as many as agree. The token predictors of node-llama-cpp 3.21 are not used: its sequences
// accept one prediction a round at most, whoever predicts (`validatedTokens` in LlamaContext.js stays empty).

import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const settings = JSON.parse(process.argv[2]);
const entry = path.resolve(settings.modules, "node-llama-cpp/dist/index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry));

const GREEDY = {temperature: 0};

const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: LlamaLogLevel.error});
const load = async (file) => {
    const model = await llama.loadModel({modelPath: file});
    const threads = settings.threads ?? 1; // those of both models spin for each other
    return model.createContext({contextSize: settings.context, sequences: 1, threads});
};
const target = await load(settings.target);
const draft = settings.draft && await load(settings.draft);
if (draft)
    target._ctx.ensureDraftContextIsCompatibleForSpeculative(draft._ctx); // llama.cpp's comparison of vocabularies

/** What a sequence samples after each of the last `count` ids of a text; ids that it has seen are not passed again. */
async function sampled(sequence, text, count, options) {
    await sequence.adaptStateToTokens(text.slice(0, -count), false);
    const rest = text.slice(sequence.nextTokenIndex);
    const asked = {generateNext: {token: true, options}};
    const output = await sequence.controlledEvaluate(
        rest.map((token, i) => (i < rest.length - count ? token : [token, asked]))
    );
    return output.slice(-count).map(({next}) => next.token);
}

async function complete(prompt, count, temperature, seed) {
    const sequence = target.getSequence(), drafting = draft?.getSequence();
    const text = [...prompt];
    const byDepth = new Array(drafting ? settings.k : 0).fill(0);
    let rounds = 0;
    for (; text.length < prompt.length + count; rounds++) {
        const drafts = [];
        while (drafting && drafts.length < settings.k)
            drafts.push(...await sampled(drafting, [...text, ...drafts], 1, GREEDY));
        // a pass has a sampler of its own: equal seeds would repeat the numbers of the round before
        const options = {temperature, topK: 0, topP: 1, minP: 0, seed: seed * 65536 + rounds};
        const own = await sampled(sequence, [...text, ...drafts], drafts.length + 1, options);
        const refuted = drafts.findIndex((token, i) => token !== own[i]);
        const agreed = refuted < 0 ? drafts.length : refuted;
        for (let depth = 0; depth < agreed; depth++)
            byDepth[depth]++;
        text.push(...own.slice(0, agreed + 1));
    }
    sequence.dispose();
    drafting?.dispose();
    return {tokens: text.slice(prompt.length, prompt.length + count), rounds, byDepth};
}

console.log(JSON.stringify({version: llama.llamaCppRelease.release}));
for await (const line of readline.createInterface({input: process.stdin})) {
    const {prompts, max_new_tokens, temperature, seed} = JSON.parse(line);
    const answer = {tokens: [], seconds: 0, rounds: 0, accepted: 0, by_depth: []};
    const start = performance.now();
    for (const [row, prompt] of prompts.entries()) {
        const {tokens, rounds, byDepth} = await complete(prompt, max_new_tokens, temperature, seed + row);
        answer.tokens.push(tokens);
        answer.rounds += rounds;
        answer.accepted += tokens.length - rounds;
        answer.by_depth = byDepth.map((count, depth) => count + (answer.by_depth[depth] ?? 0));
    }
    answer.seconds = (performance.now() - start) / 1000;
    console.log(JSON.stringify(answer));
}
process.exit(0);
