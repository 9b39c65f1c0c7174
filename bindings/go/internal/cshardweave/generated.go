// Made by bindings/generate.py from capi/shardweave.h. Do not edit.

package cshardweave

// #include "shim.h"
import "C"

// Numbers of swv_checks.
const (
	ChecksOff    = C.SWV_CHECKS_OFF
	ChecksReport = C.SWV_CHECKS_REPORT
	ChecksAbort  = C.SWV_CHECKS_ABORT
)

// Numbers of swv_code.
const (
	CodeOk                 = C.SWV_CODE_OK
	CodeCancelled          = C.SWV_CODE_CANCELLED
	CodeUnknown            = C.SWV_CODE_UNKNOWN
	CodeInvalidArgument    = C.SWV_CODE_INVALID_ARGUMENT
	CodeDeadlineExceeded   = C.SWV_CODE_DEADLINE_EXCEEDED
	CodeNotFound           = C.SWV_CODE_NOT_FOUND
	CodeAlreadyExists      = C.SWV_CODE_ALREADY_EXISTS
	CodePermissionDenied   = C.SWV_CODE_PERMISSION_DENIED
	CodeResourceExhausted  = C.SWV_CODE_RESOURCE_EXHAUSTED
	CodeFailedPrecondition = C.SWV_CODE_FAILED_PRECONDITION
	CodeAborted            = C.SWV_CODE_ABORTED
	CodeOutOfRange         = C.SWV_CODE_OUT_OF_RANGE
	CodeUnimplemented      = C.SWV_CODE_UNIMPLEMENTED
	CodeInternal           = C.SWV_CODE_INTERNAL
	CodeUnavailable        = C.SWV_CODE_UNAVAILABLE
	CodeDataLoss           = C.SWV_CODE_DATA_LOSS
	CodeUnauthenticated    = C.SWV_CODE_UNAUTHENTICATED
)

// Numbers of swv_collective_kind.
const (
	CollectiveAllReduce      = C.SWV_COLLECTIVE_ALL_REDUCE
	CollectiveAllGather      = C.SWV_COLLECTIVE_ALL_GATHER
	CollectiveAllGatherV     = C.SWV_COLLECTIVE_ALL_GATHER_V
	CollectiveReduceScatter  = C.SWV_COLLECTIVE_REDUCE_SCATTER
	CollectiveReduceScatterV = C.SWV_COLLECTIVE_REDUCE_SCATTER_V
	CollectiveAllToAll       = C.SWV_COLLECTIVE_ALL_TO_ALL
	CollectiveAllToAllV      = C.SWV_COLLECTIVE_ALL_TO_ALL_V
	CollectiveBroadcast      = C.SWV_COLLECTIVE_BROADCAST
	CollectiveReduce         = C.SWV_COLLECTIVE_REDUCE
	CollectiveGather         = C.SWV_COLLECTIVE_GATHER
	CollectiveScatter        = C.SWV_COLLECTIVE_SCATTER
	CollectiveBarrier        = C.SWV_COLLECTIVE_BARRIER
	CollectiveSend           = C.SWV_COLLECTIVE_SEND
	CollectiveRecv           = C.SWV_COLLECTIVE_RECV
)

// Numbers of swv_device_type.
const (
	DeviceCPU  = C.SWV_DEVICE_CPU
	DeviceCUDA = C.SWV_DEVICE_CUDA
)

// Numbers of swv_dtype.
const (
	DTypeDefault  = C.SWV_DTYPE_DEFAULT
	DTypeF32      = C.SWV_DTYPE_F32
	DTypeF64      = C.SWV_DTYPE_F64
	DTypeF16      = C.SWV_DTYPE_F16
	DTypeBF16     = C.SWV_DTYPE_BF16
	DTypeF8E4m3fn = C.SWV_DTYPE_F8_E4M3FN
	DTypeF8E5m2   = C.SWV_DTYPE_F8_E5M2
	DTypeI8       = C.SWV_DTYPE_I8
	DTypeI16      = C.SWV_DTYPE_I16
	DTypeI32      = C.SWV_DTYPE_I32
	DTypeI64      = C.SWV_DTYPE_I64
	DTypeU8       = C.SWV_DTYPE_U8
	DTypeU16      = C.SWV_DTYPE_U16
	DTypeU32      = C.SWV_DTYPE_U32
	DTypeU64      = C.SWV_DTYPE_U64
	DTypeBool     = C.SWV_DTYPE_BOOL
	DTypeC64      = C.SWV_DTYPE_C64
	DTypeC128     = C.SWV_DTYPE_C128
	DTypeC32      = C.SWV_DTYPE_C32
)

// Numbers of swv_grad_mode.
const (
	ModeGrad         = C.SWV_MODE_GRAD
	ModeNoGrad       = C.SWV_MODE_NO_GRAD
	ModeInference    = C.SWV_MODE_INFERENCE
	ModeAutocastF16  = C.SWV_MODE_AUTOCAST_F16
	ModeAutocastBF16 = C.SWV_MODE_AUTOCAST_BF16
)

// Numbers of swv_muon_lr_scale.
const (
	MuonOriginal      = C.SWV_MUON_ORIGINAL
	MuonMatchRmsAdamW = C.SWV_MUON_MATCH_RMS_ADAMW
)

// Numbers of swv_placement_kind.
const (
	PlacementReplicate    = C.SWV_PLACEMENT_REPLICATE
	PlacementShard        = C.SWV_PLACEMENT_SHARD
	PlacementStridedShard = C.SWV_PLACEMENT_STRIDED_SHARD
	PlacementRaggedShard  = C.SWV_PLACEMENT_RAGGED_SHARD
	PlacementPartial      = C.SWV_PLACEMENT_PARTIAL
)

// Numbers of swv_reduce_op.
const (
	ReduceSum     = C.SWV_REDUCE_SUM
	ReduceAvg     = C.SWV_REDUCE_AVG
	ReduceMin     = C.SWV_REDUCE_MIN
	ReduceMax     = C.SWV_REDUCE_MAX
	ReduceProduct = C.SWV_REDUCE_PRODUCT
)

// Numbers of swv_schedule_shape.
const (
	ScheduleConstant = C.SWV_SCHEDULE_CONSTANT
	ScheduleLinear   = C.SWV_SCHEDULE_LINEAR
	ScheduleCosine   = C.SWV_SCHEDULE_COSINE
	ScheduleWsd      = C.SWV_SCHEDULE_WSD
	ScheduleStep     = C.SWV_SCHEDULE_STEP
)

// Numbers of swv_value_kind.
const (
	ValueNone    = C.SWV_VALUE_NONE
	ValueDefault = C.SWV_VALUE_DEFAULT
	ValueTensor  = C.SWV_VALUE_TENSOR
	ValueBool    = C.SWV_VALUE_BOOL
	ValueInt     = C.SWV_VALUE_INT
	ValueFloat   = C.SWV_VALUE_FLOAT
	ValueComplex = C.SWV_VALUE_COMPLEX
	ValueString  = C.SWV_VALUE_STRING
	ValueDType   = C.SWV_VALUE_DTYPE
	ValueDevice  = C.SWV_VALUE_DEVICE
	ValueTensors = C.SWV_VALUE_TENSORS
	ValueBools   = C.SWV_VALUE_BOOLS
	ValueInts    = C.SWV_VALUE_INTS
	ValueFloats  = C.SWV_VALUE_FLOATS
)

// What the initializers of structs set, where that is not 0.
const (
	DefaultRendezvousWorldSize           = 1
	DefaultRendezvousLocalRank           = -1
	DefaultGroupNumRanks                 = 1
	DefaultDeviceCostFlops               = 5e10
	DefaultDeviceCostBandwidth           = 1e10
	DefaultPlanAutoOptimizerStates       = 2
	DefaultPlanAutoMaxEvaluations        = 120
	DefaultPlanAutoSequenceDim           = 1
	DefaultFullyShardReshardAfterForward = 1
	DefaultPowerSGDColumns               = 1
	DefaultPowerSGDMinCompressionRate    = 2.0
	DefaultPowerSGDErrorFeedback         = 1
	DefaultPowerSGDWarmStart             = 1
	DefaultGradSyncBucketBytes           = 26214400
	DefaultClipNormType                  = 2.0
	DefaultSGDLR                         = 1e-3
	DefaultAdamLR                        = 1e-3
	DefaultAdamBeta1                     = 0.9
	DefaultAdamBeta2                     = 0.999
	DefaultAdamEps                       = 1e-8
	DefaultAdamWLR                       = 1e-3
	DefaultAdamWBeta1                    = 0.9
	DefaultAdamWBeta2                    = 0.999
	DefaultAdamWEps                      = 1e-8
	DefaultAdamWWeightDecay              = 1e-2
	DefaultLionLR                        = 1e-4
	DefaultLionBeta1                     = 0.9
	DefaultLionBeta2                     = 0.99
	DefaultAdafactorLR                   = 1e-2
	DefaultAdafactorBeta2Decay           = -0.8
	DefaultAdafactorEps2                 = 1e-3
	DefaultAdafactorClipThreshold        = 1.0
	DefaultMuonLR                        = 1e-3
	DefaultMuonWeightDecay               = 0.1
	DefaultMuonMomentum                  = 0.95
	DefaultMuonNsA                       = 3.4445
	DefaultMuonNsB                       = -4.7750
	DefaultMuonNsC                       = 2.0315
	DefaultMuonEps                       = 1e-7
	DefaultMuonNsSteps                   = 5
	DefaultMuonNesterov                  = 1
	DefaultZeroStage                     = 1
	DefaultZeroBucketBytes               = 26214400
	DefaultScheduleGamma                 = 1.0
	DefaultGradScalerInitScale           = 65536.0
	DefaultGradScalerGrowthFactor        = 2.0
	DefaultGradScalerBackoffFactor       = 0.5
	DefaultGradScalerGrowthInterval      = 2000
	DefaultLoaderSeq                     = 1
	DefaultLoaderBatch                   = 1
	DefaultLoaderNumParts                = 1
	DefaultLoaderPrefetch                = 2
	DefaultSavePretrainedMaxFileBytes    = 5000000000
)

// CollectiveNames names swv_collective_kind, by its numbers.
var CollectiveNames = [14]string{
	"all_reduce",
	"all_gather",
	"all_gather_v",
	"reduce_scatter",
	"reduce_scatter_v",
	"all_to_all",
	"all_to_all_v",
	"broadcast",
	"reduce",
	"gather",
	"scatter",
	"barrier",
	"send",
	"recv",
}
