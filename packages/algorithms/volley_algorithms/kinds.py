"""The package's algorithms, as its entry points name them."""

from shared.algorithm_kinds import AlgorithmKind
from volley_algorithms.sections import (
    CispoSection,
    DapoSection,
    DppoSection,
    DrGrpoSection,
    EchoSection,
    GdpoSection,
    GspoSection,
    KpopSection,
    MaxRlSection,
    MopdSection,
    OnPolicyDistillationSection,
    OwnSection,
    RaeSection,
    ReinforcePlusPlusSection,
    RlooSection,
    SaoSection,
    SapoSection,
)

CISPO = AlgorithmKind(CispoSection, "volley_algorithms.cispo:Cispo")
DAPO = AlgorithmKind(DapoSection, "volley_algorithms.dapo:Dapo")
DPPO = AlgorithmKind(DppoSection, "volley_algorithms.dppo:Dppo")
DRGRPO = AlgorithmKind(DrGrpoSection, "volley_algorithms.drgrpo:DrGrpo")
ECHO = AlgorithmKind(EchoSection, "volley_algorithms.echo:Echo")
GDPO = AlgorithmKind(GdpoSection, "volley_algorithms.gdpo:Gdpo")
GSPO_TOKEN = AlgorithmKind(GspoSection, "volley_algorithms.gspo:Gspo")
KPOP = AlgorithmKind(KpopSection, "volley_algorithms.kpop:Kpop")
MAXRL = AlgorithmKind(MaxRlSection, "volley_algorithms.maxrl:MaxRl")
MOPD = AlgorithmKind(MopdSection, "volley_algorithms.mopd:Mopd")
ON_POLICY_DISTILLATION = AlgorithmKind(
    OnPolicyDistillationSection, "volley_algorithms.on_policy_distillation:OnPolicyDistillation"
)
OWN = AlgorithmKind(OwnSection, "volley_algorithms.rules.own:Own")
RAE = AlgorithmKind(RaeSection, "volley_algorithms.rae:Rae")
REINFORCE_PLUS_PLUS = AlgorithmKind(ReinforcePlusPlusSection, "volley_algorithms.reinforce_plus_plus:ReinforcePlusPlus")
RLOO = AlgorithmKind(RlooSection, "volley_algorithms.rloo:Rloo")
SAO = AlgorithmKind(SaoSection, "volley_algorithms.sao:Sao")
SAPO = AlgorithmKind(SapoSection, "volley_algorithms.sapo:Sapo")
