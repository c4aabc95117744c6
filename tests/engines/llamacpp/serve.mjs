// Serves a GGUF target in llama.cpp, alone or with a draft: `node serve.mjs SETTINGS`, one request a line in, one
// answer a line out.
//
// SETTINGS (JSON): modules, the folder node_modules; target and draft, GGUF files, draft null for none; k, drafts a
// round; context, the most tokens of a text; shipped, whether to draft with the library's own predictor.
// A request: {"prompts": lists of ids, "max_new_tokens", "temperature", "seed"}; its answer: {"tokens": lists of ids,
// "seconds", "rounds", "accepted", "refuted"}. A round is a pass of the target, the one over the prompt too.

import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const settings = JSON.parse(process.argv[2]);
const entry = path.resolve(settings.modules, "node-llama-cpp/dist/index.js");
const {getLlama, LlamaLogLevel, DraftSequenceTokenPredictor, TokenPredictor} = await import(pathToFileURL(entry));

const GREEDY = {temperature: 0};

/** Drafts k tokens, each the likeliest of the draft model, in every round, as llama.cpp's own server does.
 * DraftSequenceTokenPredictor loses the last draft of a round that was accepted whole, and drafts behind a gap. */
class LikeliestTokens extends TokenPredictor {
    constructor(sequence, k) {
        super();
        this.sequence = sequence;
        this.k = k;
    }

    reset({stateTokens}) {
        this.text = [...stateTokens];
    }

    pushTokens(tokens) {
        this.text.push(...tokens);
    }

    async predictTokens() {
        await this.sequence.adaptStateToTokens(this.text.slice(0, -1), false);
        let next = this.text.slice(this.sequence.nextTokenIndex);
        const drafts = [];
        while (drafts.length < this.k) {
            const input = next.map((token, i) => (
                i === next.length - 1 ? [token, {generateNext: {token: true, options: GREEDY}}] : token
            ));
            const output = await this.sequence.controlledEvaluate(input);
            next = [output.at(-1).next.token];
            drafts.push(next[0]);
        }
        return drafts;
    }
}

const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: LlamaLogLevel.error});
const load = async (file) => {
    const model = await llama.loadModel({modelPath: file});
    return model.createContext({contextSize: settings.context, sequences: 1, threads: 1}); // more spin for each other
};
const target = await load(settings.target);
const draft = settings.draft && await load(settings.draft);

function predictor(sequence) {
    if (!settings.shipped)
        return new LikeliestTokens(sequence, settings.k);
    return new DraftSequenceTokenPredictor(
        sequence, {minTokens: settings.k, maxTokens: settings.k, minConfidence: 0, evaluateOptions: GREEDY}
    );
}

async function complete(prompt, count, temperature, seed) {
    const drafting = draft && draft.getSequence();
    const sequence = target.getSequence(drafting ? {tokenPredictor: predictor(drafting)} : {});
    const options = {temperature, seed, topK: 0, topP: 1, minP: 0, yieldEogToken: true};
    const tokens = [];
    try {
        for await (const token of sequence.evaluate(prompt, options)) {
            tokens.push(token);
            if (tokens.length === count)
                break;
        }
        const {used, refuted} = sequence.tokenPredictions;
        return {tokens, used, refuted};
    } finally {
        sequence.dispose();
        drafting?.dispose();
    }
}

console.log(JSON.stringify({version: llama.llamaCppRelease}));
for await (const line of readline.createInterface({input: process.stdin})) {
    const {prompts, max_new_tokens, temperature, seed} = JSON.parse(line);
    const answer = {tokens: [], seconds: 0, rounds: 0, accepted: 0, refuted: 0};
    const start = performance.now();
    for (const [row, prompt] of prompts.entries()) {
        const {tokens, used, refuted} = await complete(prompt, max_new_tokens, temperature, seed + row);
        answer.tokens.push(tokens);
        answer.rounds += tokens.length - used; // a token is the first of a round, or a prediction that was used
        answer.accepted += used;
        answer.refuted += refuted;
    }
    answer.seconds = (performance.now() - start) / 1000;
    console.log(JSON.stringify(answer));
}
process.exit(0);
