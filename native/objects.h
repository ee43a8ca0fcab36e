/* Builds objects of Python types without their __init__, which would take most of the time. */

#ifndef WAYMARK_OBJECTS_H
#define WAYMARK_OBJECTS_H

#include "native.h"

/* Return an object of `type` with these attributes, built without its __init__. NULL with an exception. */
static inline PyObject *build_object(PyTypeObject *type, PyObject *const *names, PyObject *const *values, int count)
{
    PyObject *object = PyType_GenericAlloc(type, 0);
    for (int i = 0; object != NULL && i < count; i++)
        if (PyObject_GenericSetAttr(object, names[i], values[i]) < 0)
            Py_CLEAR(object);
    return object;
}

/* Return an object of a NamedTuple, without its __new__ in Python; takes `fields` over. NULL with an exception. */
static inline PyObject *build_named(PyObject *type, PyObject *fields)
{
    static newfunc make_tuple;
    if (make_tuple == NULL)
        make_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    PyObject *arguments = fields == NULL ? NULL : PyTuple_Pack(1, fields);
    PyObject *made = arguments == NULL ? NULL : make_tuple((PyTypeObject *)type, arguments, NULL);
    Py_XDECREF(fields);
    Py_XDECREF(arguments);
    return made;
}

/* Intern the names of attributes, each once. 0 with an exception. */
static inline int intern_names(const char *const *names, PyObject **attributes, int count)
{
    for (int i = 0; i < count; i++)
        if (attributes[i] == NULL && (attributes[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return 0;
    return 1;
}

/* Free an object, and its reference to its type, which was made from a spec. */
static inline void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Add the type of `spec` to a module, unless that is NULL. A process has one such type, however often the module is
 * loaded: *type has a reference to it. -1 with an exception. */
static inline int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type)
{
    if (*type == NULL && (*type = (PyTypeObject *)PyType_FromSpec(spec)) == NULL)
        return -1;
    return module == NULL ? 0 : PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

#define METHOD(name, function, flags, doc) {name, (PyCFunction)(void (*)(void))function, flags, doc}

#endif
