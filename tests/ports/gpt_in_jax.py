"""A small GPT with untied embeddings, in plain JAX: most tokens of its sequences follow from the last one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.ports.norms import norms

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 40, 16, 2, 2, 12, 8, 50


def initial_parameters():
    drawn = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(drawn.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    def block():
        return {
            "attention": {"scale": jnp.ones(WIDTH), "in": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH)},
            "mlp": {"scale": jnp.ones(WIDTH), "in": matrix(WIDTH, 4 * WIDTH), "out": matrix(4 * WIDTH, WIDTH)},
        }

    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(LENGTH, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "scale": jnp.ones(WIDTH),
        "head": matrix(WIDTH, VOCABULARY),
    }


def normalised(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(layer, x):
    batch, length, _ = x.shape
    x = normalised(x, layer["scale"]) @ layer["in"]
    query, key, value = jnp.split(x.reshape(batch, length, 3 * HEADS, WIDTH // HEADS), 3, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(batch, length, WIDTH) @ layer["out"]


def mlp(layer, x):
    return jax.nn.gelu(normalised(x, layer["scale"]) @ layer["in"]) @ layer["out"]


def logits_of(params, tokens):
    x = params["tokens"][tokens] + params["positions"][jnp.arange(tokens.shape[1])]
    for block in params["blocks"]:
        x = x + attention(block["attention"], x)
        x = x + mlp(block["mlp"], x)
    return normalised(x, params["scale"]) @ params["head"]


def loss_of(params, tokens):
    """Return the mean cross entropy of the next token, and the fraction of next tokens that are the likeliest ones."""
    logits, following = logits_of(params, tokens[:, :-1]), tokens[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()
    return loss, (jnp.argmax(logits, axis=-1) == following).mean()


def transformation():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 5, STEPS)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def batches():
    """Sequences with a rule: nine of ten tokens are three times the previous token plus one."""
    drawn = np.random.default_rng(0)
    for _ in range(STEPS):
        sequence = [drawn.integers(0, VOCABULARY, BATCH)]
        for _ in range(LENGTH):
            noise = drawn.integers(0, VOCABULARY, BATCH)
            sequence.append(np.where(drawn.random(BATCH) < 0.9, (3 * sequence[-1] + 1) % VOCABULARY, noise))
        yield np.stack(sequence, axis=1).astype(np.int32)


def train(microbatches=1):
    params = initial_parameters()
    optimizer = transformation()
    state = optimizer.init(params)
    differentiated = jax.value_and_grad(loss_of, has_aux=True)

    def accumulated(params, tokens):
        def add(total, part):
            (loss, accuracy), gradients = differentiated(params, part)
            return jax.tree.map(jnp.add, total, gradients), (loss, accuracy)

        parts = tokens.reshape(microbatches, -1, LENGTH + 1)
        total, (losses, accuracies) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return (losses.mean(), accuracies.mean()), jax.tree.map(lambda each: each / microbatches, total)

    @jax.jit
    def step(params, state, tokens):
        (loss, accuracy), gradients = (accumulated if microbatches > 1 else differentiated)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        return after, state, {"loss": loss, "accuracy": accuracy, **norms(gradients, params, after)}

    for tokens in batches():
        params, state, metrics = step(params, state, tokens)
        yield metrics
