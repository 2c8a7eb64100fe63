"""Rank films by predicted ratings, as Keras's example of a deep recommender does, in one process or on a cluster.

    python examples/libraries/keras_ranking.py --save ranking.keras
    dflow launch --ps 2 --workers 2 --restart on-failure examples/libraries/keras_ranking.py --save ranking.keras

Ratings are drawn in the shape of MovieLens 100K: 943 users rate 1,682 films, and a few films have most of the ratings.
An embedding of the user and one of the film go through dense layers, which predict the rating. Whether a film is liked
(a rating of 4 or more) is a second output, with an AUC.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import dflow
import dflow.keras

USERS, FILMS = 943, 1682


def ratings(count: int) -> tuple:
    """Draw ratings: users and films i32[count], and the ratings f32[count] of 1 to 5 stars."""
    drawn = np.random.default_rng(0)
    tastes, kinds = drawn.normal(size=(USERS, 4)), drawn.normal(size=(FILMS, 4))
    users = drawn.integers(USERS, size=count, dtype=np.int32)
    films = (FILMS * drawn.random(count) ** 3).astype(np.int32)
    stars = 3.2 + 0.6 * (tastes[users] * kinds[films]).sum(1) + 0.3 * drawn.normal(size=count)
    return users, films, np.clip(np.round(stars), 1, 5).astype(np.float32)


def make_model(size: int = 32) -> keras.Model:
    """Embed the user and the film, and predict the rating from both."""
    user, film = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="film")
    both = [
        keras.layers.Embedding(USERS, size, name="users")(user),
        keras.layers.Embedding(FILMS, size, name="films")(film),
    ]
    hidden = keras.layers.Concatenate()(both)
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu", name=f"hidden_{width}")(hidden)
    rating = keras.layers.Dense(1, name="rating")(hidden)
    liked = keras.layers.Dense(1, activation="sigmoid", name="liked")(hidden)
    return keras.Model({"user": user, "film": film}, {"rating": rating, "liked": liked}, name="ranking")


def compile_arguments() -> dict:
    """Losses and metrics of both outputs."""
    return {
        "optimizer": keras.optimizers.Adagrad(0.1),
        "loss": {"rating": "mse", "liked": "binary_crossentropy"},
        "metrics": {"rating": [keras.metrics.RootMeanSquaredError()], "liked": [keras.metrics.AUC(name="auc")]},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ratings", type=int, default=100_000)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--strategy", default="Sync", choices=("Sync", "Async", "AllReduce"))
    options.add_argument("--save", metavar="FILE.keras", help="save the trained model here")
    given = options.parse_args()

    users, films, stars = ratings(given.ratings)
    x, y = {"user": users, "film": films}, {"rating": stars[:, None], "liked": (stars[:, None] >= 4).astype("float32")}
    first = given.ratings * 4 // 5
    train, test = (
        [{name: part[at] for name, part in data.items()} for data in (x, y)]
        for at in (slice(first), slice(first, None))
    )

    cluster = dflow.connect(collectives=given.strategy == "AllReduce")
    keras.utils.set_random_seed(0)
    model = dflow.keras.Model(make_model(), strategy=getattr(dflow.distributed, given.strategy)(cluster))
    model.compile(**compile_arguments())
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    model.fit(*train, batch_size=1024, epochs=given.epochs, validation_data=tuple(test), callbacks=[stop], verbose=2)
    found = model.evaluate(*test, batch_size=4096, verbose=0, return_dict=True)
    if cluster.elect("the report"):
        print(f"held-out error {found['rating_root_mean_squared_error']:.4f}, AUC {found['liked_auc']:.4f}", flush=True)
        if given.save:
            model.to_keras().save(given.save)
    cluster.close()


if __name__ == "__main__":
    main()
