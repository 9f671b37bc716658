"""An ordinary script around Hugging Face's Trainer. It knows nothing of Elastic.

Model and data are tiny, so that nothing is downloaded: AutoModelForCausalLM.from_pretrained(…) and
a tokenized data set stand there in earnest.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

SENTENCE = b"preempted at midnight, resumed at noon, and not a sample lost. "


class Tokens(Dataset):
    """Sample i is the same on every machine: that is what counts samples once."""

    def __init__(self, length: int = 32):
        self.text, self.length = torch.tensor(list(SENTENCE * 40)), length

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.text[index : index + self.length]
        return {"input_ids": ids, "labels": ids}


def new_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)  # the same first parameters on every worker
    shape = {"vocab_size": 128, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(new_model(), arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
