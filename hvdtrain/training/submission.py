"""What can be checked of a run before it waits in a queue: data, model and plan."""

from hvdtrain import data
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError
from hvdtrain.training.precheck import check_before_launch
from hvdtrain.training.setup import make_plan, model_components


def check_before_submission(config: TrainConfig) -> None:
    """Refuse what the ranks would refuse hours later.

    Raises:
        UsageError: if model, plan and ranks do not fit each other.
        DataError: if the data set is damaged.
    """
    check_before_launch(config)
    if faults := data.verify(config.data):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise DataError(f"{config.data} is damaged: {faults[0]}{more}")
    index = read_index(config.data)
    components = model_components(config, index)
    make_plan(config, components, index.image_shape[0], index.classes, config.ranks or 1)
