"""A draft for a fine-tuned chat target: it learns the target's own answers to the prompts of conversations.

python docs/examples/chat_target.py [key=value ...]
"""

import sys
from pathlib import Path

from small_target import SIZES, cotrain, jsonl, sentences, target

place = Path("outputs/examples/chat")
place.mkdir(parents=True, exist_ok=True)

# conversations that the target was fine-tuned on, as it reads them
answers = sentences(400)
asked = [f"Tell how {answer.split('.')[0].lower()}" for answer in answers]
spoken = [f"<user> {question}\n<assistant> {answer}\n" for question, answer in zip(asked, answers, strict=True)]
model = target(place / "target", spoken, chat=True)

# logs of the service. Only the prompts are read: the target answers them again, in its chat template
chats = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in zip(asked, answers, strict=True)
]
logs = jsonl(place / "chats.jsonl", chats)

paths = [f"target.path={model}", f"data.path={logs}", f"output={place / 'run'}"]
settings = [*paths, *SIZES, "rollout.prompt_tokens=48", "overwrite=true", *sys.argv[1:]]
cotrain("train", *settings, "check=true")  # what the run needs, and a prompt as the target sees it
cotrain("train", *settings)
prompt = "<user> Tell how the cook counts the door\n<assistant> "
cotrain("generate", f"draft.path={place / 'run' / 'draft'}", f"prompt={prompt}", "max_new_tokens=24")
