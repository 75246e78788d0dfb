"""The package's environments, as its entry points name them."""

from services.env.environments.kinds import EnvironmentKind
from volley_environments.code.environment import Code, CodeConfig
from volley_environments.games.blocksworld import BlocksworldConfig, blocksworld
from volley_environments.games.sokoban import SokobanConfig, sokoban
from volley_environments.games.tetris import TetrisConfig, tetris
from volley_environments.gsm8k.environment import Gsm8k, Gsm8kConfig
from volley_environments.gymnasium.environment import Gymnasium, GymnasiumConfig
from volley_environments.math.environment import Math, MathConfig
from volley_environments.reasoning.reasoning_gym import ReasoningGym, ReasoningGymConfig
from volley_environments.text_to_sql.data import databases_of
from volley_environments.text_to_sql.environment import TextToSql, TextToSqlConfig

_FILES = frozenset({"train", "eval"})
BLOCKSWORLD = EnvironmentKind(BlocksworldConfig, blocksworld)
CODE = EnvironmentKind(CodeConfig, Code, _FILES, in_sandbox=True)
GSM8K = EnvironmentKind(Gsm8kConfig, Gsm8k, _FILES)
GYMNASIUM = EnvironmentKind(GymnasiumConfig, Gymnasium, distribution="gymnasium")
MATH = EnvironmentKind(MathConfig, Math, _FILES)
REASONING_GYM = EnvironmentKind(ReasoningGymConfig, ReasoningGym, distribution="reasoning-gym")
SOKOBAN = EnvironmentKind(SokobanConfig, sokoban)
TETRIS = EnvironmentKind(TetrisConfig, tetris)
TEXT_TO_SQL = EnvironmentKind(TextToSqlConfig, TextToSql, _FILES | {"databases"}, files=databases_of)
