"""The Trainer of train.py in local mode: `ElasticTrainer` is all that it takes.

Elastic hands out the samples and sets the learning rate (train.schedule, with that of
TrainingArguments at its peak); the Trainer's own schedule is constant, and it saves nothing.
"""

from transformers import Trainer, TrainingArguments

import elastic
from train import Tokens, new_model


class ElasticTrainer(Trainer):
    def get_train_dataloader(self):  # its optimizer is there when the first batch is asked for
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        with elastic.LocalSGD.from_env(self.model, optimizer) as sgd:
            for batch in sgd.batches(self.train_dataset, self.data_collator):
                yield batch
                sgd.step(self.loss)  # the next batch is asked for after optimizer.step()
            self.control.should_training_stop = True  # the run is over, or a notice has come

    def training_step(self, *args, **kwargs):
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


if __name__ == "__main__":
    arguments = TrainingArguments(
        "unused", max_steps=10**9, lr_scheduler_type="constant", learning_rate=3e-3,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=50,
    )
    ElasticTrainer(new_model(), arguments, train_dataset=Tokens()).train()
