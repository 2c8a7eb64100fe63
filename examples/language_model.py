"""A language model of words: an LSTM with its tables divided over the parameter tasks, on the text of Python's manual.

    python examples/language_model.py
    dflow launch --ps 2 --workers 2 examples/language_model.py --softmax sampled

The text is that of Python's `help()`. Sentences of similar length are padded to one of two lengths, and a thread puts
such batches into a queue for the training loop. The full softmax is computed on the tasks that hold
its weights; the sampled one looks up the rows of the next words and of a few others. The printed perplexity, of whole
batches of held-out sentences, is always that of the full softmax.
"""

import argparse
import collections
import itertools
import re
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

BATCH, LENGTHS, DIM, SAMPLES = 32, (20, 48), 64, 128
END, UNKNOWN = 0, 1  #: words before the first and after the last of a sentence, and for rare words


def read_sentences(vocabulary):
    """Return sentences as lists of word numbers, by decreasing frequency: for training, and every tenth, held out."""
    found = (
        re.findall(r"\w+|[^\w\s]", text) for topic in topics.values() for text in re.split(r"\n\n|(?<=\.)\s", topic)
    )
    sentences = [words[: LENGTHS[-1] - 1] for words in found if len(words) > 2]
    counts = collections.Counter(word for words in sentences for word in words)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(vocabulary - 2), 2)}
    numbered = [[numbers.get(word, UNKNOWN) for word in words] for words in sentences]
    return [s for place, s in enumerate(numbered) if place % 10], numbered[::10]


def batches(sentences):
    """Return batches i32[BATCH, length + 1] of sentences of similar length, padded with END to one of LENGTHS."""
    framed = (np.array([END, *sentence, END], np.int32) for sentence in sentences)
    boundaries = [length + 1 for length in LENGTHS]
    bucketed = dflow.data.bucket_by_sequence_length(framed, (), boundaries, BATCH, padding=END, drop_remainder=True)
    return (words for words, _ in bucketed)


def shuffled(sentences, seed):
    """Yield the sentences in random order, again and again."""
    order = np.random.default_rng(seed)
    while True:
        yield from (sentences[place] for place in order.permutation(len(sentences)))


def perplexity_of_frequencies(training, held_out, vocabulary):
    """Return the perplexity of held-out sentences by the frequencies of the words in the others."""
    counts = 1 + np.bincount(np.concatenate([[*s, END] for s in training]), minlength=vocabulary)
    return np.exp(-np.log(counts / counts.sum())[np.concatenate([[*s, END] for s in held_out])].mean())


def make_model(vocabulary):
    """Return the tables of the words and of the softmax, and the variables of the LSTM."""
    softmax = dflow.Embedding(vocabulary, DIM, name="softmax")
    return {
        "words": dflow.Embedding(vocabulary, DIM, name="words"),
        "softmax": softmax,
        "bias": dflow.ShardedVariable(lambda: jnp.zeros(vocabulary), near=softmax, name="bias"),
        "lstm": dflow.Variable(
            lambda: jax.random.normal(jax.random.key(0), (2 * DIM, 4 * DIM)) / np.sqrt(2 * DIM), name="lstm"
        ),
    }


def hidden_states(model, words):
    """Return the LSTM's output f32[n, length, DIM] after each word i32[n, length]."""
    kernel = model["lstm"].read()

    def step(carry, x):
        hidden, cell = carry
        keep, take, show, new = jnp.split(jnp.concatenate([x, hidden], 1) @ kernel, 4, axis=1)
        cell = jax.nn.sigmoid(keep + 1) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(show) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((len(words), DIM))
    return jax.lax.scan(step, (zeros, zeros), model["words"](words).swapaxes(0, 1))[1].swapaxes(0, 1)


def losses(model, sentences, key=None):
    """Return the sum of the cross entropies of words and ends, and their number; with a key by the sampled softmax."""
    hidden, labels = hidden_states(model, sentences[:, :-1]), sentences[:, 1:]
    counts = jnp.cumsum(labels == END, axis=1) <= (labels == END)
    if key is None:
        each = dflow.softmax_cross_entropy(model["softmax"], hidden, labels, bias=model["bias"])
    else:
        each = dflow.sampled_softmax_cross_entropy(
            model["softmax"], hidden, labels, samples=SAMPLES, key=key, bias=model["bias"]
        )
    return (each * counts).sum(), counts.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--softmax", choices=["full", "sampled"], default="full", help="of the training")
    parser.add_argument("--steps", type=int, default=600, help="training steps of all workers together")
    parser.add_argument("--vocabulary", type=int, default=2000, help="number of words; rarer ones are one word")
    options = parser.parse_args()

    training, held_out = read_sentences(options.vocabulary)
    cluster = dflow.connect()
    with cluster.parameter_servers():
        model = make_model(options.vocabulary)
        optimizer = dflow.Optimizer(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.4)), model, name="adagrad"
        )
    samples = dflow.Generator(cluster.index, name=f"samples_{cluster.index}")
    queue = dflow.PaddingFIFOQueue(8, dflow.PaddedSpec((BATCH, None), jnp.int32), name=f"sentences_{cluster.index}")

    @dflow.jit
    def train_step(sentences):
        def loss():
            total, count = losses(model, sentences, samples.split() if options.softmax == "sampled" else None)
            return total / count, count

        (value, count), gradients = dflow.value_and_grad(loss, model, has_aux=True)()
        optimizer.apply(gradients)
        return {"loss": value, "words": count}

    words, begun = 0, time.perf_counter()
    with dflow.data.feed(batches(shuffled(training, cluster.index)), queue):
        run = dflow.distributed.Async(cluster).run(
            train_step, (queue.dequeue() for _ in itertools.count()), steps=options.steps
        )
        for number, metrics in enumerate(run, 1):
            words += int(metrics["words"])
            if number % 100 == 0:
                rate = words / (time.perf_counter() - begun)
                print(f"{number:5d} steps done here, loss {metrics['loss']:.3f}, {rate:.0f} words/s", flush=True)

    if cluster.elect("evaluation"):
        evaluate = dflow.jit(lambda sentences: losses(model, sentences))
        total, count = np.sum([evaluate(sentences) for sentences in batches(held_out)], axis=0)
        by_frequency = perplexity_of_frequencies(training, held_out, options.vocabulary)
        print(f"perplexity {np.exp(total / count):.1f} on {count:.0f} held-out words", end="; ")
        print(f"by the frequency of words {by_frequency:.1f}", flush=True)
        cluster.report("perplexity", float(np.exp(total / count)))
    cluster.close()


if __name__ == "__main__":
    main()
