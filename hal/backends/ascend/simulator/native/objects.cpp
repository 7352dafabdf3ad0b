// The objects that aclnn calls take: tensors, scalars, arrays and lists behind opaque pointers.
#include "simulator.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace {

std::mutex mutex;

// Never destroyed: objects die while the process ends.
std::unordered_set<const void*>& alive() {
    static auto& instance = *new std::unordered_set<const void*>;
    return instance;
}

Object* born(Object* object) {
    std::lock_guard<std::mutex> lock(mutex);
    alive().insert(object);
    return object;
}

aclError destroy(const void* pointer) {
    if (!pointer) return SUCCESS;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!alive().erase(pointer)) return INVALID_PARAM;
    }
    delete static_cast<const Object*>(pointer);
    return SUCCESS;
}

size_t bytes_of(int dtype) {
    switch (dtype) {
        case 0: case 3: case 8: case 33: return 4;
        case 1: case 6: case 7: case 27: return 2;
        case 2: case 4: case 12: case 34: case 35: case 36: case 37: return 1;
        case 17: return 16;
        default: return 8;
    }
}

template <class T>
void* array(Kind kind, const T* values, uint64_t count) {
    auto result = new Array(kind);
    result->words.resize(count);
    for (uint64_t i = 0; i < count; ++i) {
        if (kind == Kind::floats) {
            const double wide = static_cast<double>(values[i]);
            memcpy(&result->words[i], &wide, sizeof wide);
        } else {
            result->words[i] = static_cast<int64_t>(values[i]);
        }
    }
    return born(result);
}

void* list(Kind kind, const void* const* items, uint64_t count) {
    auto result = new List(kind);
    result->items.assign(items, items + count);
    return born(result);
}

// A list owns what it holds.
aclError destroy_list(const void* pointer) {
    auto object = dynamic_cast<const List*>(sim_object(pointer));
    if (object)
        for (const void* item : object->items) destroy(item);
    return destroy(pointer);
}

}  // namespace

const Object* sim_object(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    return alive().count(pointer) ? static_cast<const Object*>(pointer) : nullptr;
}

EXPORT void* aclCreateTensor(const int64_t* shape, uint64_t rank, int dtype, const int64_t* strides, int64_t offset,
                             int format, const int64_t* storage, uint64_t storage_rank, void* data) {
    auto tensor = new Tensor;
    tensor->shape.assign(shape, shape + rank);
    tensor->storage.assign(storage, storage + storage_rank);
    tensor->dtype = dtype;
    tensor->offset = offset;
    tensor->format = format;
    tensor->data = data;
    if (strides) {
        tensor->strides.assign(strides, strides + rank);
    } else {
        tensor->strides.resize(rank);
        int64_t step = 1;
        for (uint64_t i = rank; i-- > 0;) {
            tensor->strides[i] = step;
            step *= shape[i];
        }
    }
    return born(tensor);
}
// The shape of a result whose size the operator found out: what sim_set_shape said last.
EXPORT aclError aclGetViewShape(const void* pointer, int64_t** shape, uint64_t* rank) {
    auto tensor = dynamic_cast<const Tensor*>(sim_object(pointer));
    if (!tensor) return INVALID_PARAM;
    *rank = tensor->shape.size();
    *shape = new int64_t[*rank];  // the caller's to delete
    std::copy(tensor->shape.begin(), tensor->shape.end(), *shape);
    return SUCCESS;
}
EXPORT aclError sim_set_shape(void* pointer, const int64_t* shape, uint64_t rank) {
    if (!dynamic_cast<const Tensor*>(sim_object(pointer))) return INVALID_PARAM;
    static_cast<Tensor*>(pointer)->shape.assign(shape, shape + rank);
    return SUCCESS;
}
EXPORT void* aclCreateScalar(const void* value, int dtype) {
    auto scalar = new Scalar;
    scalar->dtype = dtype;
    memcpy(scalar->value, value, bytes_of(dtype));
    return born(scalar);
}
EXPORT void* aclCreateIntArray(const int64_t* values, uint64_t count) { return array(Kind::integers, values, count); }
EXPORT void* aclCreateFloatArray(const float* values, uint64_t count) { return array(Kind::floats, values, count); }
EXPORT void* aclCreateBoolArray(const bool* values, uint64_t count) { return array(Kind::booleans, values, count); }
EXPORT void* aclCreateTensorList(const void* const* items, uint64_t count) { return list(Kind::tensors, items, count); }
EXPORT void* aclCreateScalarList(const void* const* items, uint64_t count) { return list(Kind::scalars, items, count); }

EXPORT aclError aclDestroyTensor(const void* pointer) { return destroy(pointer); }
EXPORT aclError aclDestroyScalar(const void* pointer) { return destroy(pointer); }
EXPORT aclError aclDestroyIntArray(const void* pointer) { return destroy(pointer); }
EXPORT aclError aclDestroyFloatArray(const void* pointer) { return destroy(pointer); }
EXPORT aclError aclDestroyBoolArray(const void* pointer) { return destroy(pointer); }
EXPORT aclError aclDestroyTensorList(const void* pointer) { return destroy_list(pointer); }
EXPORT aclError aclDestroyScalarList(const void* pointer) { return destroy_list(pointer); }
