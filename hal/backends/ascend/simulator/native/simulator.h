// Shared by the parts of the simulated CANN. What begins with sim_ is ours; all else has the name CANN gives it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int aclError;

// The codes of the public headers (acl_base_rt.h, rt_error_codes.h, aclnn's own).
constexpr aclError SUCCESS = 0;
constexpr aclError INVALID_PARAM = 100000;
constexpr aclError INVALID_DEVICE = 107001;
constexpr aclError NO_CONTEXT = 107002;
constexpr aclError OUT_OF_MEMORY = 207001;
constexpr aclError NOT_SUPPORTED = 200001;
constexpr aclError FAILURE = 500001;
constexpr aclError ACLNN_PARAM_INVALID = 161002;
constexpr aclError ACLNN_INNER_ERROR = 561000;

struct Configuration {
    std::string soc;
    std::string cann;
    int devices = 0;
    uint64_t memory = 0;  // bytes a device
    int64_t cube_cores = 0;
    int64_t vector_cores = 0;
    int64_t l2 = 0;  // bytes
};

// Kinds of objects that aclnn calls receive through opaque pointers.
enum class Kind { tensor = 1, scalar, integers, floats, booleans, tensors, scalars };

struct Object {
    const Kind kind;
    explicit Object(Kind kind) : kind(kind) {}
    virtual ~Object() = default;
};

struct Tensor : Object {
    std::vector<int64_t> shape, strides, storage;
    int dtype = 0;
    int64_t offset = 0;  // elements
    int format = 0;
    void* data = nullptr;
    Tensor() : Object(Kind::tensor) {}
};

struct Scalar : Object {
    int dtype = 0;
    unsigned char value[16] = {};
    Scalar() : Object(Kind::scalar) {}
};

struct Array : Object {
    std::vector<int64_t> words;  // doubles by their bits
    explicit Array(Kind kind) : Object(kind) {}
};

struct List : Object {
    std::vector<const void*> items;
    explicit List(Kind kind) : Object(kind) {}
};

// Whether the Python side runs; starts it on the first question.
bool sim_ready();
const Configuration& sim_configuration();

// The device in whose memory a pointer lies; -1: the host's.
int sim_device_of(const void* pointer);

// The object behind a pointer if it is one of ours and alive, else null: never reads what it does not know.
const Object* sim_object(const void* pointer);

// The text that aclGetRecentErrMsg gives this thread next.
EXPORT void sim_set_error(const char* message);

// Events that the trace wants to know of.
enum class Event { synchronise_stream, synchronise_device, synchronise_event, copy };
void sim_note(Event event, int64_t detail, int64_t bytes, bool asynchronous);

// Graph capture. Work for a stream in capture is kept for the replay; each of the others says SUCCESS, or what is wrong
// with such a call in a capture, which is invalidated then.
bool sim_captured(const void* stream);
aclError sim_capture(const void* stream, std::function<aclError()> work);
aclError sim_wait_in_capture(const void* stream, const char* call);  // null: for all streams
aclError sim_unsafe_in_capture(const char* call);
aclError sim_ask_event(const void* event, const char* call);
aclError sim_record_event(const void* event, const void* stream);
aclError sim_wait_event(const void* stream, const void* event);

// Operators of the wheel, in the order of the entry points (generated).
extern "C" const char* const sim_operator_names[];
extern "C" const int sim_operator_total;
