"""Train with your own Keras program on many ranks: only the lines with `distributed` are new.

With one process, and with two ranks:

    python examples/keras_script.py data/cifar10
    mpirun -np 2 --bind-to none python examples/keras_script.py data/cifar10
"""

import sys

import keras

import hvdtrain.keras as distributed

BATCH_SIZE, EPOCHS = 64, 3  # images per step, over all ranks together

world = distributed.start()
data = distributed.datasets(sys.argv[1], BATCH_SIZE, holdout=0.2)

model = keras.Sequential(
    [
        keras.layers.Input((data.image_size, data.image_size, 3)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(data.classes),
    ]
)
model.compile(
    distributed.optimizer(keras.optimizers.Adam(0.001)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    data.train,
    steps_per_epoch=data.steps_per_epoch,
    epochs=EPOCHS,
    shuffle=False,
    validation_data=data.validation,
    callbacks=distributed.callbacks(save_to="keras_script.keras"),
    verbose=2 if world.rank == 0 else 0,
)
metrics = distributed.evaluate(model, data.test, verbose=0)
if world.rank == 0:
    print(f"test accuracy {metrics['accuracy']:.4f} on {world.size} rank(s)")
